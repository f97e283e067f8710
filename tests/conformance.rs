//! The upstream checks of the outbox contract, on our store.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::sync::Arc;

use diesel_outbox::PgOutbox;
use diesel_outbox::turnframe::TurnframeOutbox;
use support::db::TestDb;
use turnframe_store::conformance::{
    check_outbox_claim_exclusivity_and_reschedule, check_refused_settlement_writes_nothing,
};
use turnframe_store::memory::MemoryStores;
use turnframe_store::stores::Stores;

const ROUNDS: usize = 20;

/// Our outbox among in-memory stores for the other roles.
fn stores(db: &TestDb) -> Stores {
    let memory = Arc::new(MemoryStores::new());
    Stores::builder()
        .conversations(memory.clone())
        .interactions(memory.clone())
        .journal(memory.clone())
        .events(memory.clone())
        .outbox(Arc::new(TurnframeOutbox::new(
            PgOutbox::connect(db.url()).unwrap(),
        )))
        .replay(memory.clone())
        .commit(memory)
        .build()
        .unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Runtime::new().unwrap()
}

#[test]
fn claims_are_exclusive_until_rescheduled_or_settled() {
    for _ in 0..ROUNDS {
        let db = TestDb::new();
        runtime()
            .block_on(check_outbox_claim_exclusivity_and_reschedule(&stores(&db)))
            .unwrap();
    }
}

#[test]
fn a_refused_settlement_writes_nothing() {
    for _ in 0..ROUNDS {
        let db = TestDb::new();
        runtime()
            .block_on(check_refused_settlement_writes_nothing(&stores(&db)))
            .unwrap();
    }
}
