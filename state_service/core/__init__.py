"""Pure decisions of the state service: no I/O, no clock, no await."""
