"""Changes to the modules of a user's model, in a declared order: applied, suspended, and undone in reverse. Knows
neither units nor ranks.
"""
