"""Other libraries' names over our op: change the import, keep the calls. docs/compat.md has what
differs."""
