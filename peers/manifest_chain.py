"""The run's manifest at the coordinator: what a view changes of it is written down before the view is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from peers.journal import Journal
from peers.run_folder import RunFolder
from protocol.manifest import Manifest
from protocol.run_changes import changes
from protocol.signing import SigningKey
from protocol.view import View


class ManifestChain:
    """The chain in `folder`, whose newest link is `newest`; the first view says from which step a changed one holds."""

    def __init__(self, folder: RunFolder, newest: Manifest, key: SigningKey, journal: Journal) -> None:
        self._folder, self._key, self._journal = folder, key, journal
        self.newest = newest

    def follow(self, view: View) -> None:
        """Write down what `view` means for the manifest.

        Raises:
            OSError: the disk is full or the folder not writable; the view must wait.
            UserError: the run's files are damaged.
        """
        for manifest, text in self._links(view):
            if self._folder.exists():
                before = self._folder.open()[0]
                self._folder.amend(manifest, self._key)
                self._note(before, manifest, text)
            self.newest = manifest

    def _links(self, view: View) -> Iterator[tuple[Manifest, str]]:
        first = view.restored + 1
        if not self.newest.from_step:  # the run was resumed with another configuration, and now goes on with it
            yield replace(self.newest, from_step=first), "the configuration is another"
        elif first < self.newest.from_step:
            yield self.newest.followed_by(first), "the run went back to before its configuration was changed"
        passed = sorted(set(view.skipped) - set(self.newest.skipped))
        if passed:
            names = ", ".join(map(str, passed))
            yield self.newest.followed_by(passed[0], skipped=view.skipped), f"step {names} is passed over"

    def _note(self, before: Manifest, after: Manifest, text: str) -> None:
        found = changes(before.config, after.config)
        named = "".join(f"; {change}" for change in found)
        self._journal.note(
            "changed",
            f"from step {after.from_step} on: {text}{named}",
            from_step=after.from_step,
            fields={change.field: [change.old, change.new] for change in found},
            skipped=list(after.skipped),
            manifest=after.hash,
        )
