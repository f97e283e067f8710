//! What a schema is, in lines that can be compared.

use std::collections::BTreeSet;

use diesel::prelude::*;
use diesel::sql_query;
use diesel::sql_types::Text;

/// Everything the schema `public` holds but the two migrators' own tables: a
/// line for each table, column, constraint, index, trigger and function, with
/// its definition.
const DESCRIBE: &str = "
    WITH relation AS (
        SELECT oid, relname, relkind, reloptions FROM pg_class
         WHERE relnamespace = 'public'::regnamespace
           AND relname NOT IN ('__diesel_schema_migrations', '_sqlx_migrations')
    )
    SELECT concat_ws(' ', 'relation', relname, relkind, reloptions::text,
                     obj_description(oid, 'pg_class')) AS line
      FROM relation WHERE relkind IN ('r', 'S', 'v')
    UNION ALL
    SELECT concat_ws(' ', 'column', relname, attname, format_type(atttypid, atttypmod),
                     collname, attnotnull, pg_get_expr(adbin, adrelid),
                     col_description(attrelid, attnum))
      FROM relation
      JOIN pg_attribute ON attrelid = relation.oid AND attnum > 0 AND NOT attisdropped
      LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
      LEFT JOIN pg_collation ON pg_collation.oid = attcollation
     WHERE relkind = 'r'
    UNION ALL
    SELECT concat_ws(' ', 'constraint', relname, conname, pg_get_constraintdef(pg_constraint.oid))
      FROM relation JOIN pg_constraint ON conrelid = relation.oid
    UNION ALL
    SELECT concat_ws(' ', 'index', pg_get_indexdef(indexrelid), indisvalid)
      FROM relation JOIN pg_index ON indrelid = relation.oid
    UNION ALL
    SELECT concat_ws(' ', 'trigger', pg_get_triggerdef(pg_trigger.oid))
      FROM relation JOIN pg_trigger ON tgrelid = relation.oid AND NOT tgisinternal
    UNION ALL
    SELECT concat_ws(' ', 'function', pg_get_functiondef(oid))
      FROM pg_proc WHERE pronamespace = 'public'::regnamespace";

/// The schema of `conn`'s database.
pub fn describe(conn: &mut PgConnection) -> BTreeSet<String> {
    strings(conn, DESCRIBE).into_iter().collect()
}

/// The column `line` of a query's rows.
pub fn strings(conn: &mut PgConnection, query: &str) -> Vec<String> {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = Text)]
        line: String,
    }
    sql_query(query)
        .load::<Row>(conn)
        .unwrap_or_else(|error| panic!("{query}: {error}"))
        .into_iter()
        .map(|row| row.line)
        .collect()
}
