"""The one function that upstream's server tests take from the wget package, which has no wheel and is kept no more."""

from urllib.request import urlretrieve


def download(url: str, out: str) -> str:
    """Writes what the URL gives to the file ``out``; returns its path. Raises OSError."""
    return urlretrieve(url, out)[0]
