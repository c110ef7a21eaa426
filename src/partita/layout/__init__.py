"""A model on paper: units, rows, placement, and the formulas for bytes held and operations performed. Allocates
nothing, and knows neither process groups nor predicted times.
"""
