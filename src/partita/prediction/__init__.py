"""Optional package: what a configuration will take, before it runs. Reads the formulas of :mod:`partita.layout`;
nothing below imports it.
"""
