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

CREATE SEQUENCE IF NOT EXISTS tf_outbox_claim_seq AS bigint;

-- The async implementation's index of this name walks every undue row; ours
-- serves its claim as well. One that has been made ahead of time is kept.
DO $$
BEGIN
    IF to_regclass('tf_outbox_due') IS NOT NULL
       AND pg_get_indexdef(to_regclass('tf_outbox_due')) NOT ILIKE '%coalesce%' THEN
        DROP INDEX tf_outbox_due;
    END IF;
END
$$;

CREATE INDEX IF NOT EXISTS tf_outbox_due
    ON tf_outbox (created_at, outbox_id, coalesce(next_attempt_at, '-infinity'::timestamptz))
    WHERE status = 'pending';

CREATE INDEX IF NOT EXISTS tf_outbox_by_command
    ON tf_outbox (command_id, created_at, outbox_id);

CREATE INDEX IF NOT EXISTS tf_outbox_claims
    ON tf_outbox (claim_taken_at)
    WHERE status = 'dispatching';

-- What the dispatcher claims, in the order in which rows came due. Apart for rows
-- with a key and without: a pile that waits on one key stands in nobody's way.
CREATE INDEX IF NOT EXISTS tf_outbox_ready
    ON tf_outbox (destination, greatest(enqueued_at, next_attempt_at), outbox_id)
    WHERE status = 'pending' AND ordering_key IS NULL;

CREATE INDEX IF NOT EXISTS tf_outbox_ready_keyed
    ON tf_outbox (destination, greatest(enqueued_at, next_attempt_at), outbox_id)
    WHERE status = 'pending' AND ordering_key IS NOT NULL;

-- Order per key. False sorts first, so the first entry of a key says all: what
-- blocks it (in flight, unknown, failed and halting), or else its head.
CREATE INDEX IF NOT EXISTS tf_outbox_key
    ON tf_outbox (destination, ordering_key, (status = 'pending'), created_at, outbox_id)
    WHERE ordering_key IS NOT NULL
      AND (status IN ('pending', 'dispatching', 'outcome_unknown') OR (halts_key AND status = 'failed'));

-- What reconciliation looks through: normally empty.
CREATE INDEX IF NOT EXISTS tf_outbox_unknown
    ON tf_outbox (destination, unknown_since, outbox_id)
    WHERE status = 'outcome_unknown';

-- IF NOT EXISTS also finds an index that a failed CREATE INDEX CONCURRENTLY
-- left behind; such a one would never be used. The host's own are its business.
DO $$
DECLARE
    broken text;
BEGIN
    SELECT string_agg(c.relname, ', ' ORDER BY c.relname) INTO broken
      FROM pg_catalog.pg_index i
      JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
     WHERE i.indrelid = to_regclass('tf_outbox') AND NOT i.indisvalid
       AND c.relname IN ('tf_outbox_due', 'tf_outbox_by_command', 'tf_outbox_claims',
                         'tf_outbox_ready', 'tf_outbox_ready_keyed', 'tf_outbox_key',
                         'tf_outbox_unknown');
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'tf_outbox has an invalid index (%): drop it and run the migration again', broken;
    END IF;
END
$$;

-- Every row is updated twice or more in its life and no update is HOT, so dead
-- rows gather fast.
ALTER TABLE tf_outbox SET (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 1000
);

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
