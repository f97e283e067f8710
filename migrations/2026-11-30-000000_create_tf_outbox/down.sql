-- Takes away what is ours, and only that.
--
-- The table itself goes only if we made it and the async implementation
-- (turnframe-store-postgres, recorded in _sqlx_migrations) does not rely on it.
-- Otherwise its rows, constraints and its own index on due rows remain.

DROP TRIGGER IF EXISTS tf_outbox_wakeup ON tf_outbox;
DROP FUNCTION IF EXISTS tf_outbox_notify();
DROP FUNCTION IF EXISTS tf_outbox_heads(text, text[]);
DROP FUNCTION IF EXISTS tf_outbox_keys(text, text, integer);
DROP FUNCTION IF EXISTS tf_outbox_due_destinations(text[]);
DROP FUNCTION IF EXISTS tf_outbox_due_keyed_destinations(text[]);
DROP FUNCTION IF EXISTS tf_outbox_next_due(text[]);
DROP FUNCTION IF EXISTS tf_outbox_unknown_destinations(text[]);

DO $$
DECLARE
    ours   boolean := coalesce(obj_description(to_regclass('tf_outbox'), 'pg_class') LIKE '%Made by diesel-outbox.', false);
    shared boolean := false;
    thing  text;
BEGIN
    IF to_regclass('tf_outbox') IS NULL THEN
        DROP SEQUENCE IF EXISTS tf_outbox_claim_seq;
        RETURN;
    END IF;

    IF to_regclass('_sqlx_migrations') IS NOT NULL THEN
        EXECUTE 'SELECT EXISTS (SELECT FROM _sqlx_migrations WHERE version = 20260101000000)' INTO shared;
    END IF;

    IF ours AND NOT shared THEN
        DROP TABLE tf_outbox;
        DROP SEQUENCE tf_outbox_claim_seq;
        RETURN;
    END IF;

    FOR thing IN
        SELECT i.indexrelid::regclass::text
          FROM pg_catalog.pg_index i
          JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
         WHERE i.indrelid = 'tf_outbox'::regclass
           AND c.relname IN ('tf_outbox_due', 'tf_outbox_ready', 'tf_outbox_ready_keyed',
                             'tf_outbox_key', 'tf_outbox_unknown')
    LOOP
        EXECUTE format('DROP INDEX %s', thing);
    END LOOP;
    ALTER TABLE tf_outbox
        DROP COLUMN IF EXISTS enqueued_at,
        DROP COLUMN IF EXISTS claim_seq,
        DROP COLUMN IF EXISTS claim_expires_at,
        DROP COLUMN IF EXISTS lapse_count,
        DROP COLUMN IF EXISTS unknown_since,
        DROP COLUMN IF EXISTS ordering_key,
        DROP COLUMN IF EXISTS halts_key,
        DROP COLUMN IF EXISTS headers,
        DROP COLUMN IF EXISTS probe_count;
    -- Those that still have our value: another is the owner's.
    FOR thing IN
        SELECT o.option_name
          FROM pg_catalog.pg_class c, pg_catalog.pg_options_to_table(c.reloptions) o
         WHERE c.oid = 'tf_outbox'::regclass
           AND (o.option_name, o.option_value) IN (
                ('autovacuum_vacuum_scale_factor', '0.01'),
                ('autovacuum_vacuum_threshold', '1000'),
                ('autovacuum_analyze_scale_factor', '0.02'),
                ('autovacuum_analyze_threshold', '1000'))
    LOOP
        EXECUTE format('ALTER TABLE tf_outbox RESET (%I)', thing);
    END LOOP;
    CREATE INDEX tf_outbox_due ON tf_outbox (created_at, outbox_id) WHERE status = 'pending';
    DROP SEQUENCE tf_outbox_claim_seq;
    -- From here on the table is theirs, also for a later `up` and `down`.
    IF ours THEN
        COMMENT ON TABLE tf_outbox IS NULL;
    END IF;
END
$$;
