"""Pure decisions: no I/O, no clock, no await. Each module is one table or machine of the documents."""
