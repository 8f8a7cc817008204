"""An engine: one data-parallel rank that schedules and runs steps; and the client that feeds all of them."""
