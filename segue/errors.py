"""One error tree for the whole project.

    SegueError
    ├── ConfigError            a config key that is unknown, missing, malformed or contradicts another
    ├── LogError               the event log refused or could not do something
    │   ├── FencedError        a newer epoch of this producer exists; this writer must stop
    │   ├── GapError           a sequence number was skipped: an event before this one was lost
    │   ├── ConflictError      a second fact of one logical key with other identity fields
    │   ├── SessionSeqError    another process appended to the session first
    │   ├── LogCorruptError    a torn tail, a broken hash chain, a log that went back in time
    │   ├── LogTrimmedError    the positions asked for live in sealed segments only
    │   ├── LogSealedError     a sealed log takes no appends
    │   └── LogUnavailable     the log server does not answer (retryable)
    ├── CodecError             bytes that do not decode to what they claim to be
    ├── BlobError              a blob that is missing, damaged or outside its root
    ├── RequestError           an HTTP request that cannot be served; carries status, type and param
    ├── EngineError            an engine answered wrongly
    │   └── EngineUnavailable  an engine does not answer or is shutting down (retryable)
    ├── TrainerError           the training side cannot do what was asked
    └── ProcessError           a child process that cannot start or keeps dying

`retryable` is a fact of the class: the same call may succeed later without any change by the caller.
All fields are plain values, so every error pickles across process borders.
"""

from __future__ import annotations


class SegueError(Exception):
    """Root of all errors that segue raises on purpose."""

    retryable: bool = False


class ConfigError(SegueError):
    """A config value is wrong; the message names the key and the remedy."""


class LogError(SegueError):
    """The event log refused or could not do something."""


class FencedError(LogError):
    """A newer epoch of the same producer exists; the holder of the older one must stop."""


class GapError(LogError):
    """A writer's sequence number is ahead of the log's: something before it was lost."""


class ConflictError(LogError):
    """A fact with the same logical key but other identity fields is in the log already."""


class SessionSeqError(LogError):
    """The session has moved on: another process owns it now."""


class LogCorruptError(LogError):
    """The log's bytes contradict themselves (torn tail, hash chain, rewound positions)."""


class LogTrimmedError(LogError):
    """The live log no longer holds these positions; sealed segments do."""


class LogSealedError(LogError):
    """The log is a sealed file: it can only be read."""


class LogUnavailable(LogError):
    """The log server does not answer."""

    retryable = True


class CodecError(SegueError):
    """Bytes do not decode; the message gives type, version and field path."""


class BlobError(SegueError):
    """A blob is missing or damaged, or a reference points outside the store."""


class RequestError(SegueError):
    """An HTTP request that is answered with an error body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(status, kind, message, param)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def __str__(self) -> str:
        return f"{self.status} {self.kind}: {self.message}"


class EngineError(SegueError):
    """An inference engine answered with an error or with something that breaks the contract."""


class EngineUnavailable(EngineError):
    """An inference engine does not answer."""

    retryable = True


class TrainerError(SegueError):
    """The trainer cannot do what was asked of it."""


class ProcessError(SegueError):
    """A child process failed to start or keeps dying."""
