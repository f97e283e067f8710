//! The SQL functions and literals that the transitions are built from.

use diesel::expression::is_aggregate;
use diesel::expression::{AppearsOnTable, Expression, SelectableExpression, ValidGrouping};
use diesel::pg::Pg;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::result::QueryResult;
use diesel::sql_types::{
    Array, Integer, Interval, Nullable, SingleValue, SqlType, Text, Timestamptz, Uuid,
};

diesel::define_sql_function! {
    /// The server's clock at the start of the statement. Stable, so that it can
    /// bound an index scan; `clock_timestamp()` is volatile and cannot.
    fn statement_timestamp() -> Timestamptz;
}

diesel::define_sql_function! {
    /// The later of two instants; passes over a null.
    #[sql_name = "greatest"]
    fn later_of(a: Timestamptz, b: Nullable<Timestamptz>) -> Timestamptz;
}

diesel::define_sql_function! {
    /// The first that is not null. As indexed by `tf_outbox_due`.
    #[sql_name = "coalesce"]
    fn instant_or(a: Nullable<Timestamptz>, b: Timestamptz) -> Timestamptz;
}

diesel::define_sql_function! {
    /// `instant + interval`, for operands that Diesel knows no `+` for.
    #[sql_name = "timestamptz_pl_interval"]
    fn after(instant: Timestamptz, delay: Interval) -> Timestamptz;
}

diesel::define_sql_function! {
    /// `instant - interval`, for operands that Diesel knows no `-` for.
    #[sql_name = "timestamptz_mi_interval"]
    fn before(instant: Timestamptz, delay: Interval) -> Timestamptz;
}

diesel::define_sql_function! {
    /// The first entry of each key: its head, or what blocks it. A set-returning
    /// function of the migration, to stand in `ARRAY(SELECT …)`.
    fn tf_outbox_heads(destination: Text, keys: Array<Text>) -> Uuid;
}

diesel::define_sql_function! {
    /// The next `n` keys after `after` that have open rows.
    fn tf_outbox_keys(destination: Text, after: Text, n: Integer) -> Array<Text>;
}

diesel::define_sql_function! {
    /// Which destinations have due rows without a key.
    fn tf_outbox_due_destinations(destinations: Array<Text>) -> Array<Text>;
}

diesel::define_sql_function! {
    /// Which destinations have due rows with a key.
    fn tf_outbox_due_keyed_destinations(destinations: Array<Text>) -> Array<Text>;
}

diesel::define_sql_function! {
    /// When the next row that is not due yet falls due.
    fn tf_outbox_next_due(destinations: Array<Text>) -> Nullable<Timestamptz>;
}

diesel::define_sql_function! {
    /// Which destinations have rows of unknown outcome.
    fn tf_outbox_unknown_destinations(destinations: Array<Text>) -> Array<Text>;
}

diesel::define_sql_function! {
    /// Takes a lock until the end of the transaction, unless somebody has it.
    fn pg_try_advisory_xact_lock(class: Integer, object: Integer) -> Bool;
}

diesel::define_sql_function! {
    /// Takes a lock until the end of the session, unless somebody has it.
    fn pg_try_advisory_lock(class: Integer, object: Integer) -> Bool;
}

diesel::define_sql_function! {
    /// Gives up a lock of the session.
    fn pg_advisory_unlock(class: Integer, object: Integer) -> Bool;
}

diesel::define_sql_function! {
    /// A number for a text.
    fn hashtext(text: Text) -> Integer;
}

diesel::define_sql_function! {
    /// The next number of a sequence.
    fn nextval(sequence: Text) -> BigInt;
}

diesel::define_sql_function! {
    /// Where in the array an id stands, from 1.
    fn array_position(ids: Array<Uuid>, id: Uuid) -> Nullable<Integer>;
}

diesel::define_sql_function! {
    /// Sends a notification when the transaction commits.
    fn pg_notify(channel: Text, payload: Text) -> Text;
}

diesel::define_sql_function! {
    /// The first that is not null.
    #[sql_name = "coalesce"]
    fn first_of<T: SqlType + SingleValue>(a: Nullable<T>, b: Nullable<T>) -> Nullable<T>;
}

/// A literal in the text of the statement, where a bind parameter would hide
/// the value from the planner: a generic plan cannot prove that `status = $1`
/// fits a partial index, nor match `$1` with a constant inside an index
/// expression.
macro_rules! literal {
    ($(#[$meta:meta])* $name:ident: $sql_type:ty = $sql:literal) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, QueryId)]
        pub(crate) struct $name;

        impl Expression for $name {
            type SqlType = $sql_type;
        }

        impl<G> ValidGrouping<G> for $name {
            type IsAggregate = is_aggregate::Never;
        }

        impl<T> SelectableExpression<T> for $name {}
        impl<T> AppearsOnTable<T> for $name {}

        impl QueryFragment<Pg> for $name {
            fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
                out.push_sql($sql);
                Ok(())
            }
        }
    };
}

literal! {
    /// The status of rows to be found by a claim.
    Pending: Text = "'pending'"
}
literal! {
    /// The status of rows to be found by a sweep of claims.
    Dispatching: Text = "'dispatching'"
}
literal! {
    /// The status of rows to be found by reconciliation.
    OutcomeUnknown: Text = "'outcome_unknown'"
}
literal! {
    /// Before all instants: stands for "due at once" in `tf_outbox_due`.
    Beginning: Timestamptz = "'-infinity'::timestamptz"
}
