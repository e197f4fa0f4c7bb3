"""A user's reward file: a score that nearly every response differs in, so that every group has a gradient."""


def dense(response: str, row: dict) -> float:
    return sum(ord(c) % 7 for c in response) / 10 + len(response) / 20
