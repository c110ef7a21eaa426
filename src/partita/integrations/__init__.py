"""Doors for other libraries: each translates its library's calls to partita's, and needs an optional extra."""
