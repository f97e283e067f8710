//! Pages to read; no code.

#[doc = include_str!("../docs/tutorial.md")]
pub mod tutorial {}

#[doc = include_str!("../docs/dispatcher.md")]
pub mod dispatcher {}

#[doc = include_str!("../docs/filled-table.md")]
pub mod filled_table {}
