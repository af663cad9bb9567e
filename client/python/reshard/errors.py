"""What a call of libreshard fails with: one class for each code of reshard.h, all of them reshard.Error."""


class Error(Exception):
    """str() is one line that names the tensor, rank, worker or file and the remedy; `code` is reshard.h's."""

    code = 0


def _error(name, code, doc):
    return type(name, (Error,), {"__doc__": doc, "__module__": "reshard", "code": code})


InvalidArgument = _error("InvalidArgument", -1, "Breaks a rule of the interface: fix the call.")
NotFound = _error("NotFound", -2, "No such model, version, tensor or worker: fix the call.")
AlreadyExists = _error("AlreadyExists", -3, "That rank is attached, or that version has other content.")
FailedPrecondition = _error("FailedPrecondition", -4, "Fits the rules, but not the state: the text tells which.")
PermissionDenied = _error("PermissionDenied", -5, "Not yours, or not your role's.")
Unauthenticated = _error("Unauthenticated", -6, "The daemon would not know this client, even after a new hello.")
Unimplemented = _error("Unimplemented", -7, "The daemon is older than this library.")
ResourceExhausted = _error("ResourceExhausted", -8, "A limit, which the text names: less, or later.")
OutOfMemory = _error("OutOfMemory", -9, "Memory is out, here or at the daemon.")
Aborted = _error("Aborted", -10, "The attempt ended, the text says why: submit again.")
DeadlineExceeded = _error("DeadlineExceeded", -11, "The deadline ended; the text names what was missing.")
Canceled = _error("Canceled", -12, "Detached or closed from another thread, or a callback said stop.")
Unavailable = _error("Unavailable", -13, "There was no daemon until the deadline.")
PeerFailed = _error("PeerFailed", -14, "Another daemon or data plane failed: again.")
ProtocolError = _error("ProtocolError", -15, "The other side does not speak this protocol.")
DeviceFailed = _error("DeviceFailed", -16, "A device failed.")
DiskFailed = _error("DiskFailed", -17, "The daemon's ledger failed: for the operator.")
DiskFull = _error("DiskFull", -18, "The daemon's disk is full: for the operator.")
DataLoss = _error("DataLoss", -19, "Content differs; the text blames tensor, box and rank.")
SystemCallFailed = _error("SystemCallFailed", -20, "A system call failed in this process.")
InternalError = _error("InternalError", -21, "A bug.")

OF_CODE = {c.code: c for c in list(globals().values()) if isinstance(c, type) and issubclass(c, Error) and c is not Error}

__all__ = ["Error", *(c.__name__ for c in OF_CODE.values())]
