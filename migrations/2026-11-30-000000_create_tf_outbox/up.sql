-- The outbox table, its indexes and its wake-up.
--
-- Runs on an empty database and on one where the async implementation
-- (turnframe-store-postgres) has already made and filled tf_outbox: rows and
-- constraint names stay, our columns and indexes are added. The other order of
-- arrival works too, because that migration says IF NOT EXISTS throughout.

-- Remember who made the table: `down` drops it only if we did.
DO $$
BEGIN
    IF to_regclass('tf_outbox') IS NULL THEN
        CREATE TABLE tf_outbox (
            outbox_id       uuid        PRIMARY KEY,
            command_id      uuid        NOT NULL,
            destination     text        NOT NULL,
            payload         jsonb       NOT NULL,
            idempotency_key text        NOT NULL,
            status          text        NOT NULL,
            attempt_count   integer     NOT NULL DEFAULT 0 CHECK (attempt_count >= 0),
            next_attempt_at timestamptz,
            created_at      timestamptz NOT NULL,
            completed_at    timestamptz,
            claim_worker_id text,
            claim_taken_at  timestamptz,
            last_failure    text,
            remote_ref      text,
            CONSTRAINT tf_outbox_destination_idempotency_key UNIQUE (destination, idempotency_key)
        );
        COMMENT ON TABLE tf_outbox IS 'Transactional outbox. Made by diesel-outbox.';
    END IF;
END
$$;

-- Each of these is nullable or defaulted, so that an INSERT which does not know
-- it still works.
ALTER TABLE tf_outbox
    ADD COLUMN IF NOT EXISTS enqueued_at      timestamptz NOT NULL DEFAULT statement_timestamp(),
    ADD COLUMN IF NOT EXISTS claim_seq        bigint,
    ADD COLUMN IF NOT EXISTS claim_expires_at timestamptz,
    ADD COLUMN IF NOT EXISTS lapse_count      integer     NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS unknown_since    timestamptz,
    ADD COLUMN IF NOT EXISTS ordering_key     text COLLATE "C",
    ADD COLUMN IF NOT EXISTS halts_key        boolean     NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS headers          jsonb,
    ADD COLUMN IF NOT EXISTS probe_count      integer     NOT NULL DEFAULT 0;

COMMENT ON COLUMN tf_outbox.enqueued_at IS 'When the row was inserted, by the server''s clock; due times are judged by it, never by created_at.';
COMMENT ON COLUMN tf_outbox.claim_seq IS 'The fence: one number for each claim ever taken. Null while pending.';
COMMENT ON COLUMN tf_outbox.claim_expires_at IS 'End of the lease that the claimer itself wrote, renewed with the claim.';
COMMENT ON COLUMN tf_outbox.lapse_count IS 'Claims that lapsed since the last answer.';
COMMENT ON COLUMN tf_outbox.unknown_since IS 'When the outcome became unknown, by the server''s clock.';
COMMENT ON COLUMN tf_outbox.ordering_key IS 'Rows of one destination and key are begun one after another, oldest first.';
COMMENT ON COLUMN tf_outbox.halts_key IS 'On a failed row: later rows of its key wait for an operator.';
COMMENT ON COLUMN tf_outbox.headers IS 'What travels beside the payload: trace context, content type. An object of strings.';
COMMENT ON COLUMN tf_outbox.probe_count IS 'How often reconciliation has asked about this row.';

-- IF NOT EXISTS also passes over a column of the same name and another meaning: one
-- made ahead of time with a slip, or one of the host's own.
DO $$
DECLARE
    wrong text;
BEGIN
    SELECT string_agg(name, ', ' ORDER BY name) INTO wrong
      FROM (VALUES
            ('outbox_id',        'uuid',                     true,  NULL),
            ('command_id',       'uuid',                     true,  NULL),
            ('destination',      'text',                     true,  NULL),
            ('payload',          'jsonb',                    true,  NULL),
            ('idempotency_key',  'text',                     true,  NULL),
            ('status',           'text',                     true,  NULL),
            ('attempt_count',    'integer',                  true,  NULL),
            ('next_attempt_at',  'timestamp with time zone', false, NULL),
            ('created_at',       'timestamp with time zone', true,  NULL),
            ('completed_at',     'timestamp with time zone', false, NULL),
            ('claim_worker_id',  'text',                     false, NULL),
            ('claim_taken_at',   'timestamp with time zone', false, NULL),
            ('last_failure',     'text',                     false, NULL),
            ('remote_ref',       'text',                     false, NULL),
            ('enqueued_at',      'timestamp with time zone', true,  'statement_timestamp()'),
            ('claim_seq',        'bigint',                   false, NULL),
            ('claim_expires_at', 'timestamp with time zone', false, NULL),
            ('lapse_count',      'integer',                  true,  '0'),
            ('unknown_since',    'timestamp with time zone', false, NULL),
            ('ordering_key',     'text',                     false, NULL),
            ('halts_key',        'boolean',                  true,  'false'),
            ('headers',          'jsonb',                    false, NULL),
            ('probe_count',      'integer',                  true,  '0')
           ) expected (name, type, not_null, value)
      LEFT JOIN pg_catalog.pg_attribute a
        ON a.attrelid = 'tf_outbox'::regclass AND a.attname = name AND NOT a.attisdropped
      LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
      LEFT JOIN pg_catalog.pg_collation l ON l.oid = a.attcollation
     WHERE a.attname IS NULL
        OR format_type(a.atttypid, a.atttypmod) <> type
        OR a.attnotnull <> not_null
        OR (value IS NOT NULL AND pg_get_expr(d.adbin, d.adrelid) IS DISTINCT FROM value)
        OR (name = 'ordering_key' AND l.collname <> 'C');
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'tf_outbox has columns of another definition (%): see docs/filled-table.md', wrong;
    END IF;
END
$$;

CREATE SEQUENCE IF NOT EXISTS tf_outbox_claim_seq AS bigint;

-- The indexes. One that was made ahead of time is kept if it is valid and is the
-- one that would be made here, which an empty table of the same columns tells; its
-- tablespace and storage parameters are its owner's business. A failed CREATE INDEX
-- CONCURRENTLY leaves an invalid one behind, which would never be used.
DO $$
DECLARE
    wanted record;
    made   record;
    other  text := '';
    broken text := '';
BEGIN
    CREATE TABLE tf_outbox_pattern (LIKE tf_outbox);
    FOR wanted IN
        SELECT * FROM (VALUES
            -- Serves the public claim, and that of the async implementation, whose
            -- own index of this name walks every row that is not due yet.
            ('tf_outbox_due', $i$
                (created_at, outbox_id, coalesce(next_attempt_at, '-infinity'::timestamptz))
                WHERE status = 'pending' $i$),
            -- These two are as the async implementation has them.
            ('tf_outbox_by_command', $i$ (command_id, created_at, outbox_id) $i$),
            ('tf_outbox_claims', $i$ (claim_taken_at) WHERE status = 'dispatching' $i$),
            -- What the dispatcher claims, in the order in which rows came due. Apart
            -- for rows with a key and without: a pile that waits on one key stands
            -- in nobody's way.
            ('tf_outbox_ready', $i$
                (destination, greatest(enqueued_at, next_attempt_at), outbox_id)
                WHERE status = 'pending' AND ordering_key IS NULL $i$),
            ('tf_outbox_ready_keyed', $i$
                (destination, greatest(enqueued_at, next_attempt_at), outbox_id)
                WHERE status = 'pending' AND ordering_key IS NOT NULL $i$),
            -- Order per key. False sorts first, so the first entry of a key says all:
            -- what blocks it (in flight, unknown, failed and halting), or else its head.
            ('tf_outbox_key', $i$
                (destination, ordering_key, (status = 'pending'), created_at, outbox_id)
                WHERE ordering_key IS NOT NULL
                  AND (status IN ('pending', 'dispatching', 'outcome_unknown') OR (halts_key AND status = 'failed')) $i$),
            -- What reconciliation looks through: normally empty.
            ('tf_outbox_unknown', $i$
                (destination, unknown_since, outbox_id)
                WHERE status = 'outcome_unknown' $i$)
        ) w (name, definition)
    LOOP
        EXECUTE format('CREATE INDEX tf_outbox_pattern_index ON tf_outbox_pattern %s', wanted.definition);
        SELECT i.indexrelid::regclass AS index, i.indisvalid AS valid,
               NOT i.indisunique
               AND regexp_replace(split_part(pg_get_indexdef(i.indexrelid), ' USING ', 2), ' WITH \([^)]*\)', '')
                   = split_part(pg_get_indexdef('tf_outbox_pattern_index'::regclass), ' USING ', 2) AS same,
               wanted.name = 'tf_outbox_due'
               AND pg_get_indexdef(i.indexrelid) LIKE '% USING btree (created_at, outbox_id) WHERE (status = ''pending''::text)' AS theirs
          INTO made
          FROM pg_catalog.pg_index i
          JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
         WHERE i.indrelid = 'tf_outbox'::regclass AND c.relname = wanted.name;
        DROP INDEX tf_outbox_pattern_index;
        IF made.theirs THEN
            EXECUTE format('DROP INDEX %s', made.index);
        END IF;
        IF made.index IS NULL OR made.theirs THEN
            EXECUTE format('CREATE INDEX %I ON tf_outbox %s', wanted.name, wanted.definition);
        ELSIF NOT made.same THEN
            other := concat_ws(', ', nullif(other, ''), wanted.name);
        ELSIF NOT made.valid THEN
            broken := concat_ws(', ', nullif(broken, ''), wanted.name);
        END IF;
    END LOOP;
    DROP TABLE tf_outbox_pattern;
    IF other <> '' THEN
        RAISE EXCEPTION 'tf_outbox has an index of another definition (%): drop it or rename it, and run the migration again', other;
    END IF;
    IF broken <> '' THEN
        RAISE EXCEPTION 'tf_outbox has an invalid index (%): drop it and run the migration again', broken;
    END IF;
END
$$;

-- Every row is updated twice or more in its life and no update is HOT, so dead
-- rows gather fast. What the owner has set stays.
DO $$
DECLARE
    setting record;
BEGIN
    FOR setting IN
        SELECT * FROM (VALUES
            ('autovacuum_vacuum_scale_factor', '0.01'),
            ('autovacuum_vacuum_threshold', '1000'),
            ('autovacuum_analyze_scale_factor', '0.02'),
            ('autovacuum_analyze_threshold', '1000')
        ) s (name, value)
         WHERE name NOT IN (SELECT o.option_name
                              FROM pg_catalog.pg_class c, pg_catalog.pg_options_to_table(c.reloptions) o
                             WHERE c.oid = 'tf_outbox'::regclass)
    LOOP
        EXECUTE format('ALTER TABLE tf_outbox SET (%I = %s)', setting.name, setting.value);
    END LOOP;
END
$$;

-- What the dispatcher asks and typed Diesel cannot say. STABLE is load-bearing:
-- the functions read with the snapshot of the calling statement. Their conditions
-- repeat the predicates of the indexes word for word.

-- The first entry of each key: its head, or what blocks it.
CREATE OR REPLACE FUNCTION tf_outbox_heads(dest text, keys text[]) RETURNS SETOF uuid
    LANGUAGE sql STABLE ROWS 100
AS $$
    SELECT (SELECT h.outbox_id
              FROM tf_outbox h
             WHERE h.destination = dest AND h.ordering_key = k AND h.ordering_key IS NOT NULL
               AND (h.status IN ('pending', 'dispatching', 'outcome_unknown') OR (h.halts_key AND h.status = 'failed'))
             ORDER BY h.destination, h.ordering_key, (h.status = 'pending'), h.created_at, h.outbox_id
             LIMIT 1)
      FROM unnest(keys) k
$$;

-- The next `n` keys after `after` that have rows in the index, each found by one
-- descent.
CREATE OR REPLACE FUNCTION tf_outbox_keys(dest text, after text, n integer) RETURNS text[]
    LANGUAGE sql STABLE
AS $$
    WITH RECURSIVE k AS (
        (SELECT o.ordering_key, 1 AS i
           FROM tf_outbox o
          WHERE o.destination = dest AND o.ordering_key > after AND o.ordering_key IS NOT NULL
            AND (o.status IN ('pending', 'dispatching', 'outcome_unknown') OR (o.halts_key AND o.status = 'failed'))
          ORDER BY o.destination, o.ordering_key
          LIMIT 1)
        UNION ALL
        SELECT x.ordering_key, k.i + 1
          FROM k
         CROSS JOIN LATERAL (
            SELECT o.ordering_key
              FROM tf_outbox o
             WHERE o.destination = dest AND o.ordering_key > k.ordering_key AND o.ordering_key IS NOT NULL
               AND (o.status IN ('pending', 'dispatching', 'outcome_unknown') OR (o.halts_key AND o.status = 'failed'))
             ORDER BY o.destination, o.ordering_key
             LIMIT 1) x
         WHERE k.i < n
    )
    SELECT coalesce(array_agg(k.ordering_key ORDER BY k.i), '{}') FROM k
$$;

-- Which of the destinations have due rows without a key, each by one descent.
CREATE OR REPLACE FUNCTION tf_outbox_due_destinations(dests text[]) RETURNS text[]
    LANGUAGE sql STABLE
AS $$
    SELECT coalesce(array_agg(d), '{}')
      FROM unnest(dests) d
     WHERE EXISTS (
        SELECT FROM tf_outbox o
         WHERE o.destination = d AND o.status = 'pending' AND o.ordering_key IS NULL
           AND greatest(o.enqueued_at, o.next_attempt_at) <= statement_timestamp())
$$;

-- Which of them have due rows with a key.
CREATE OR REPLACE FUNCTION tf_outbox_due_keyed_destinations(dests text[]) RETURNS text[]
    LANGUAGE sql STABLE
AS $$
    SELECT coalesce(array_agg(d), '{}')
      FROM unnest(dests) d
     WHERE EXISTS (
        SELECT FROM tf_outbox o
         WHERE o.destination = d AND o.status = 'pending' AND o.ordering_key IS NOT NULL
           AND greatest(o.enqueued_at, o.next_attempt_at) <= statement_timestamp())
$$;

-- When the next row of the destinations falls due that is not due yet.
CREATE OR REPLACE FUNCTION tf_outbox_next_due(dests text[]) RETURNS timestamptz
    LANGUAGE sql STABLE
AS $$
    SELECT least(
        min((SELECT greatest(o.enqueued_at, o.next_attempt_at)
               FROM tf_outbox o
              WHERE o.destination = d AND o.status = 'pending' AND o.ordering_key IS NULL
                AND greatest(o.enqueued_at, o.next_attempt_at) > statement_timestamp()
              ORDER BY greatest(o.enqueued_at, o.next_attempt_at)
              LIMIT 1)),
        min((SELECT greatest(o.enqueued_at, o.next_attempt_at)
               FROM tf_outbox o
              WHERE o.destination = d AND o.status = 'pending' AND o.ordering_key IS NOT NULL
                AND greatest(o.enqueued_at, o.next_attempt_at) > statement_timestamp()
              ORDER BY greatest(o.enqueued_at, o.next_attempt_at)
              LIMIT 1)))
      FROM unnest(dests) d
$$;

-- Which of them have rows of unknown outcome.
CREATE OR REPLACE FUNCTION tf_outbox_unknown_destinations(dests text[]) RETURNS text[]
    LANGUAGE sql STABLE
AS $$
    SELECT coalesce(array_agg(d), '{}')
      FROM unnest(dests) d
     WHERE EXISTS (
        SELECT FROM tf_outbox o
         WHERE o.destination = d AND o.status = 'outcome_unknown')
$$;

-- Wakes idle dispatchers, for rows inserted by any driver. The notification
-- carries nothing: the row is found by looking.
CREATE OR REPLACE FUNCTION tf_outbox_notify() RETURNS trigger
    LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM pg_catalog.pg_notify('tf_outbox', '');
    RETURN NULL;
END
$$;

-- A NOTIFY makes commits queue, so it is sent only if a dispatcher wants to sleep.
-- Two advisory locks say so: 1, "a dispatcher wants to sleep", held by it; and 2,
-- "inserted and not notified", held by us to the end of the transaction. We take 2
-- before we look at 1; the dispatcher takes 1 before it looks at 2: one of the two
-- sees the other. It is one expression so that no cancel can fall between taking
-- 1 and giving it back.
DROP TRIGGER IF EXISTS tf_outbox_wakeup ON tf_outbox;
CREATE TRIGGER tf_outbox_wakeup
    AFTER INSERT ON tf_outbox
    FOR EACH STATEMENT
    WHEN (NOT (pg_catalog.pg_try_advisory_xact_lock_shared(7311, 2)
               AND pg_catalog.pg_try_advisory_lock_shared(7311, 1)
               AND pg_catalog.pg_advisory_unlock_shared(7311, 1)))
    EXECUTE FUNCTION tf_outbox_notify();
