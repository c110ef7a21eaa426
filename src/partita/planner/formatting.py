"""Numbers formatted for messages."""


def format_bytes(num_bytes: float) -> str:
    """Format bytes in decimal units with three digits: 812 MB, 1.57 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
