"""Reading a source file by file: its documents, and the account of what is odd about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from peers.data.folder_files import FolderFiles, unreadable
from peers.data.formats import Format
from peers.data.json_lines import describe_bad, read_json_lines
from peers.data.text_file import FileText, NotText, describe_odd, read_text, too_odd
from protocol.errors import UserError


@dataclass(slots=True)
class Reading:
    """One source being read, and what was met so far. `json_field`: of JSON lines; None: files are read as they are.

    Attributes:
        characters: of all files.
        empty: documents without text.
        odd: of each file with odd characters: its path, how many, and what it might be.
        bad: for each reason, how many JSON lines were left out; `first_bad`: the first of them.
        halves: half surrogate pairs that were replaced.
        refused: files that are not text.
    """

    json_field: str | None
    characters: int = 0
    empty: int = 0
    odd: list[tuple[Path, int, Format]] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)
    first_bad: str = ""
    halves: int = 0
    refused: list[NotText] = field(default_factory=list)

    def documents(self, path: Path) -> Iterator[str]:
        """The documents of one file, without empty ones; none of a file that is to be refused.

        Raises:
            UserError: the file cannot be read, or too many of its JSON lines are bad.
        """
        try:
            file = read_text(path)
        except NotText as error:
            self.refused.append(error)
            return
        except OSError as error:
            raise unreadable(path, error) from error
        self.characters += len(file.text)
        if file.guess is not None:
            self.odd.append((path, file.odd, file.guess))
        for text in self._texts(file):
            if text:
                yield text
            else:
                self.empty += 1

    def _texts(self, file: FileText) -> list[str]:
        if self.json_field is None:
            return [file.text]
        found = read_json_lines(file, self.json_field)
        self.bad += found.bad
        self.first_bad = self.first_bad or found.first
        self.halves += found.halves
        return found.texts

    def check(self) -> None:
        """Check that all that was read is text.

        Raises:
            UserError: a file is not, or all together have too many odd characters.
        """
        total = sum(odd for _, odd, _ in self.odd)
        if not self.refused and too_odd(total, self.characters):
            path, odd, guess = max(self.odd, key=lambda one: one[1])
            why = f"{odd:,} of its characters are not text, and {describe_odd(total, self.characters)} of all files"
            self.refused.append(NotText(path, guess, why))
        if self.refused:
            first, others = self.refused[0], len(self.refused) - 1
            more = f" ({others:,} more of the files are not text)" if others else ""
            raise UserError(f"{first}{more}; {first.remedy}")

    def tell(self, say: Callable[[str], None], name: str, found: FolderFiles) -> None:
        """Say what was read from the source `name`, what was passed over, and what is odd."""
        files = f"{len(found.files):,} file{'s' * (len(found.files) != 1)}, {self.characters:,} characters"
        passed_over = [found.describe()] if found.describe() else []
        passed_over += [f"empty {self.empty:,}"] if self.empty else []
        say(f"data in {name}: {files}" + (f"; passed over: {', '.join(passed_over)}" if passed_over else ""))
        if odd := sum(count for _, count, _ in self.odd) + self.halves:
            where = f"; the first in {self.odd[0][0]}" if self.odd else ""
            say(f"warning: {describe_odd(odd, self.characters)} are not text, replaced or left as they are{where}")
        if self.bad:
            say(f"warning: lines left out: {describe_bad(self.bad)}; the first: {self.first_bad}")
