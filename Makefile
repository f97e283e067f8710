# For a stranger there are two commands: `make demo` and `make test`.
# Both use the server of DATABASE_URL if that is set, else one of their own.

# Where rustup puts cargo, for a shell that has not been told.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help demo test bench-wakeup lint doc check-schema

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 16

demo: ## an order service whose effects survive a killed dispatcher (ORDERS=path: your own)
	@scripts/setup demo
	cargo run --locked --features migrations --example order_service -- demo $(if $(ORDERS),--orders '$(ORDERS)')

test: ## every test, in parallel, each with a database of its own
	@scripts/setup test
	scripts/test

bench-wakeup: ## what waking an idle dispatcher costs, and whom
	@scripts/setup test
	cargo bench --locked --features migrations --bench wakeup

lint: ## formatting and clippy, warnings as errors
	cargo fmt --check
	cargo clippy --locked --all-features --all-targets -- -D warnings

doc: ## the documentation, warnings as errors
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --all-features

check-schema: ## src/schema.rs against the migrations, by the real diesel CLI
	@scripts/setup test
	scripts/check-schema
