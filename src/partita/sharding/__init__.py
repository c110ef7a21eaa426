"""Units at work: which parameters move together, where they are now, when they are gathered, released and reduced."""
