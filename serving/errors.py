"""The error tree of `serving`.

ServingError            anything below, one sentence that names the thing, its value, the rule and the remedy
+-- ModelError          the description of a model, or one of its files, cannot be served
+-- RepositoryError     a repository is missing, empty, foreign, damaged, or cannot be written
+-- StartError          a server cannot start, or died
+-- UnavailableError    no server answers, or it takes no more requests now; the same request may succeed later
+-- RequestError        these texts are wrong; sending them again gives the same answer
+-- NotFoundError       the server has no such model or version
+-- SmokeError          a new version answers other than its files did when they were published
+-- DeadlineError       an answer, or a start, took longer than the caller allows
"""


class ServingError(Exception):
    """Base of every error that `serving` raises on purpose."""

    exit_code = 1
    """What a command line exits with: 1, the input or the environment is wrong."""


class ModelError(ServingError):
    """The description of a model, or one of its files, cannot be served."""


class RepositoryError(ServingError):
    """A repository is missing, empty, foreign, damaged, or cannot be written."""


class StartError(ServingError):
    """A server cannot start, or died; the message ends with the last lines of its log, where it has one."""


class UnavailableError(ServingError):
    """No server answers, it is not ready, or its queue is full; the same request may succeed later."""


class RequestError(ServingError):
    """The texts are wrong, here or by the server's own word; sending them again gives the same answer."""


class NotFoundError(ServingError):
    """The server has no such model or version, or what answers there is no such server."""


class SmokeError(ServingError):
    """A version that was to be deployed answers other than it must; the one before goes on."""

    exit_code = 3
    """A gate failed."""


class DeadlineError(ServingError):
    """An answer, or a start, took longer than the caller allows."""
