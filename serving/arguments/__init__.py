"""A command's flags: `fields` is how they are declared, `parser` how words are read."""
