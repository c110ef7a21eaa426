"""Communication between ranks: process groups along mesh axes, collectives, the watchdog. Knows no parameters."""
