// @generated automatically by Diesel CLI.

diesel::table! {
    tf_outbox (outbox_id) {
        outbox_id -> Uuid,
        command_id -> Uuid,
        destination -> Text,
        payload -> Jsonb,
        idempotency_key -> Text,
        status -> Text,
        attempt_count -> Int4,
        next_attempt_at -> Nullable<Timestamptz>,
        created_at -> Timestamptz,
        completed_at -> Nullable<Timestamptz>,
        claim_worker_id -> Nullable<Text>,
        claim_taken_at -> Nullable<Timestamptz>,
        last_failure -> Nullable<Text>,
        remote_ref -> Nullable<Text>,
        enqueued_at -> Timestamptz,
        claim_seq -> Nullable<Int8>,
        claim_expires_at -> Nullable<Timestamptz>,
        lapse_count -> Int4,
        unknown_since -> Nullable<Timestamptz>,
        ordering_key -> Nullable<Text>,
        halts_key -> Bool,
        headers -> Nullable<Jsonb>,
        probe_count -> Int4,
    }
}
