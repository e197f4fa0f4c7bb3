"""A reward that costs nothing and differs from response to response."""


def length(response: str, row: dict) -> float:
    return len(response) / 100
