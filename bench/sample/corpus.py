"""The text that the sample model learns from, out of two Debian packages whose texts anyone may use for anything.

    apt-get download r-cran-janeaustenr sword-text-web
    for package in *.deb; do dpkg-deb -x $package packages; done
    python -m bench.sample.corpus packages sample-text.xz

r-cran-janeaustenr  Jane Austen's six novels: public domain; the package is under the MIT licence.
sword-text-web      World English Bible: public domain. Its name is a trademark for the unchanged text, and this
                    program changes it (notes and numbers of verses go, quotation marks become ASCII).

The result is one paragraph a line; an empty line begins a chapter.
"""

from __future__ import annotations

import html
import lzma
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import click

NOVELS = Path("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
BIBLE = Path("usr/share/sword/modules/texts/ztext/engWEB2015eb")

R_STRINGS = 16  # type of a character vector in R's serialization
ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...", "\u00a0": " "})


def tidy(text: str) -> str:
    """One line of plain text."""
    return re.sub(r"\s+", " ", text.translate(ASCII)).strip()


def r_strings(path: Path) -> Iterator[list[str]]:
    """The character vectors of an R data base: chunks of four length bytes and a zlib stream each."""
    data = path.read_bytes()
    while data:
        stream = zlib.decompressobj()
        chunk = stream.decompress(data[4:])
        data = stream.unused_data
        # "X\n", three version numbers, then, in version 3, the name of the encoding
        start = 14 if chunk[5] == 2 else 18 + struct.unpack_from(">i", chunk, 14)[0]
        flags, n = struct.unpack_from(">ii", chunk, start)
        if flags & 0xFF != R_STRINGS:
            continue
        start += 8
        lines = []
        for _ in range(n):
            _, length = struct.unpack_from(">ii", chunk, start)
            lines.append(chunk[start + 8 : start + 8 + length].decode())
            start += 8 + length
        yield lines


def novel_chapters(path: Path) -> Iterator[list[str]]:
    for lines in r_strings(path):
        text = "\n".join(line.strip() for line in lines).replace("_", "")
        for chapter in re.split(r"\n(?:VOLUME|Volume|CHAPTER|Chapter) \w+\.?(?=\n)", text)[1:]:
            paragraphs = [tidy(paragraph) for paragraph in re.split(r"\n\n+", chapter)]
            yield [paragraph for paragraph in paragraphs if paragraph and paragraph not in ("FINIS", "THE END")]


def bible_chapters(folder: Path) -> Iterator[list[str]]:
    for part in ("ot", "nt"):
        index = (folder / f"{part}.bzs").read_bytes()
        blocks = (folder / f"{part}.bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index):
            if size:
                yield from book_chapters(zlib.decompress(blocks[offset : offset + size]).decode())


def book_chapters(osis: str) -> Iterator[list[str]]:
    """Chapters of one book from its OSIS XML, in paragraphs."""
    text = re.sub(r"<(note|title|figure)\b[^>]*?(?<!/)>.*?</\1>", "", osis, flags=re.DOTALL)
    text = re.sub(r'<(?:div|lg)\b[^>]*\bsID="[^>]*>', "\n", text)
    for chapter in re.split(r'<chapter\b[^>]*\bsID="[^>]*>', text)[1:]:
        plain = html.unescape(re.sub(r"<[^>]+>", "", chapter)).replace("\x00", "")
        lines = [tidy(line) for line in plain.split("\n")]
        yield [re.sub(r" ([,.;:!?])", r"\1", line) for line in lines if re.search(r"[a-z]", line)]


def build(packages: Path) -> str:
    """The whole text; FileNotFoundError if a package was not unpacked into the folder `packages`."""
    chapters = [*novel_chapters(packages / NOVELS), *bible_chapters(packages / BIBLE)]
    return "\n\n".join("\n".join(chapter) for chapter in chapters if len(chapter) > 1) + "\n"


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.argument("packages", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(packages: Path, out: Path) -> None:
    try:
        text = build(packages)
    except OSError as error:
        raise click.ClickException(f"{error}; unpack both packages into {packages}, see {__file__}") from error
    out.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{out}: {len(text):,} characters, {out.stat().st_size:,} bytes compressed")


if __name__ == "__main__":
    main()
