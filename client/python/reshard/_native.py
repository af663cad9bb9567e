"""libreshard's calls and structs by ctypes, as client/reshard.h declares them. A ctypes call lets other threads run."""
import ctypes
import ctypes.util
import os
import pathlib
from ctypes import (CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64,
                    c_uint8, c_void_p)

from . import errors

SONAME = "libreshard.so.0"
MAX_DIMS, TEXT_BYTES = 8, 1024


def _struct(name, fields):
    return type(name, (Structure,), {"_fields_": fields, "__doc__": f"struct reshard_{name}"})


error = _struct("error", [("code", c_int), ("text", c_char * TEXT_BYTES)])
box = _struct("box", [("n_dims", c_uint32), ("offset", c_uint64 * MAX_DIMS), ("size", c_uint64 * MAX_DIMS)])
tensor = _struct("tensor", [("name", c_char_p), ("dtype", c_char_p), ("element_bytes", c_uint32), ("n_dims", c_uint32),
                            ("shape", c_uint64 * MAX_DIMS)])
cuda_export = _struct("cuda_export", [("device", c_char_p), ("ipc_handle", POINTER(c_uint8)), ("vmm_fd", c_int),
                                      ("allocation_bytes", c_uint64), ("offset_bytes", c_uint64), ("allocation", c_uint64)])
piece = _struct("piece", [("tensor", c_char_p), ("segment", c_void_p), ("offset_bytes", c_uint64), ("whole_shard", c_bool),
                          ("box", box), ("dense", c_bool), ("stride_bytes", c_int64 * MAX_DIMS)])
attach = _struct("attach", [("model", c_char_p), ("side", c_int), ("layout", c_void_p), ("rank", c_uint32),
                            ("device", c_uint32), ("receive", c_int), ("accept_automatically", c_bool),
                            ("live", POINTER(piece)), ("n_live", c_size_t), ("shadow", POINTER(piece)), ("n_shadow", c_size_t),
                            ("live_version", c_uint64), ("shadow_version", c_uint64)])
worker_info = _struct("worker_info", [("worker", c_uint64), ("committed", c_uint64), ("held", c_uint64),
                                      ("applied", c_uint64), ("reattached", c_uint64), ("evicted", c_bool)])
event = _struct("event", [("type", c_int), ("version", c_uint64), ("attempt", c_uint64), ("reason", c_char * TEXT_BYTES)])
expected = _struct("expected", [("tensor", c_char_p), ("fingerprint", c_uint64)])
strategy_rule = _struct("strategy_rule", [("glob", c_char_p), ("strategy", c_int)])
policy = _struct("policy", [("layout_name", c_char_p), ("min_instances", c_uint32)])
submit = _struct("submit", [("release_at", c_int), ("verify", c_int), ("strategy", c_int), ("rules", POINTER(strategy_rule)),
                            ("n_rules", c_size_t), ("policy", POINTER(policy)), ("n_policy", c_size_t),
                            ("prepare_timeout_ms", c_uint32), ("transfer_timeout_ms", c_uint32),
                            ("accept_timeout_ms", c_uint32), ("request_id", c_char_p), ("rehearsal", c_bool)])
bytes_ = type("bytes", (Structure,), {"_fields_": [(n, c_uint64) for n in
                                                   ("landed", "total", "network", "domain", "device", "skipped",
                                                    "network_minimum")], "__doc__": "struct reshard_bytes"})
state = _struct("state", [("version", c_uint64), ("attempt", c_uint64), ("phase", c_int), ("bytes", bytes_),
                          ("source_released", c_bool), ("elapsed_ns", c_uint64), ("reason", c_char * TEXT_BYTES),
                          ("waiting_for", c_char * TEXT_BYTES)])
view = _struct("view", [("tensor", c_char_p), ("dtype", c_char_p), ("box", box), ("data", c_void_p), ("dense", c_bool),
                        ("stride_bytes", c_int64 * MAX_DIMS)])
committed = _struct("committed", [("version", c_uint64), ("committed_wall_ns", c_uint64), ("held", c_uint64),
                                  ("applied", c_uint64)])

STRUCTS = (error, box, tensor, cuda_export, piece, attach, worker_info, event, expected, strategy_rule, policy, submit, bytes_,
           state, view, committed)
progress = CFUNCTYPE(c_int, POINTER(state), c_void_p)

_E, _P = POINTER(error), c_void_p
# name: result, arguments. Those whose last argument is _E fail with a code (call() raises for it).
_CALLS = {
    "connect": (c_int, c_char_p, c_uint32, POINTER(_P), _E),
    "close": (None, _P),
    "incarnation": (c_uint64, _P),
    "reconnects": (c_uint64, _P),
    "segment_new": (c_int, _P, c_uint64, c_uint32, POINTER(_P), _E),
    "segment_adopt": (c_int, _P, c_int, c_uint64, c_uint32, POINTER(_P), _E),
    "segment_cuda": (c_int, _P, c_void_p, c_uint64, c_uint32, POINTER(_P), _E),
    "segment_cuda_exported": (c_int, _P, POINTER(cuda_export), c_uint64, c_uint32, POINTER(_P), _E),
    "segment_device": (c_uint32, _P),
    "segment_data": (c_void_p, _P),
    "segment_bytes": (c_uint64, _P),
    "segment_free": (c_int, _P, c_uint32, _E),
    "layout_from_json": (c_int, c_char_p, c_size_t, POINTER(_P), _E),
    "layout_free": (None, _P),
    "layout_name": (c_char_p, _P),
    "layout_n_ranks": (c_uint32, _P),
    "layout_n_tensors": (c_uint32, _P),
    "layout_tensor": (c_int, _P, c_uint32, POINTER(tensor)),
    "layout_find": (c_int64, _P, c_char_p),
    "layout_shards": (c_uint32, _P, c_uint32, c_uint32, POINTER(box), c_uint32),
    "layout_rank_bytes": (c_uint64, _P, c_uint32),
    "pieces_dense": (c_int, _P, c_uint32, _P, c_uint64, c_uint32, POINTER(POINTER(piece)), POINTER(c_size_t),
                     POINTER(c_uint64), _E),
    "pieces_free": (None, POINTER(piece)),
    "attach": (c_int, _P, POINTER(attach), c_uint32, POINTER(_P), _E),
    "sleep": (c_int, _P, c_uint32, _E),
    "wake": (c_int, _P, POINTER(piece), c_size_t, POINTER(piece), c_size_t, c_uint32, _E),
    "detach": (None, _P),
    "worker_info": (None, _P, POINTER(worker_info)),
    "next_event": (c_int, _P, c_uint32, POINTER(event), _E),
    "event_name": (c_char_p, c_int),
    "publish": (c_int, _P, c_uint64, POINTER(expected), c_size_t, c_uint32, _E),
    "publish_after": (c_int, _P, c_uint64, c_void_p, POINTER(expected), c_size_t, c_uint32, _E),
    "push_begin": (None, _P, c_uint64),
    "withdraw": (c_int, _P, c_uint64, c_char_p, c_uint32, _E),
    "ready": (c_int, _P, c_uint64, c_uint32, _E),
    "accept": (c_int, _P, c_uint64, c_uint64, c_uint32, _E),
    "reject": (c_int, _P, c_uint64, c_uint64, c_char_p, c_uint32, _E),
    "apply": (c_int, _P, c_uint64, c_uint32, POINTER(c_uint64), _E),
    "skip": (c_int, _P, c_uint64, c_uint32, _E),
    "submit": (c_int, _P, c_char_p, c_uint64, POINTER(submit), c_uint32, POINTER(c_uint64), _E),
    "phase_name": (c_char_p, c_int),
    "wait": (c_int, _P, c_char_p, c_uint64, c_int, progress, c_void_p, c_uint32, POINTER(state), _E),
    "rehearse_fill": (c_int, POINTER(view), _E),
    "rehearse_check": (c_int, POINTER(view), _E),
    "mark": (c_int, _P, c_char_p, c_uint64, c_char_p, _P, c_uint32, _E),
    "committed": (c_int, _P, c_char_p, c_uint64, c_uint32, _P, c_uint32, POINTER(committed), _E),
    "error_name": (c_char_p, c_int),
}


def _load():
    """RESHARD_LIBRARY of the environment; a library beside this package (a wheel that has one); the loader's path."""
    named = os.environ.get("RESHARD_LIBRARY")
    beside = pathlib.Path(__file__).with_name(SONAME)
    try:
        return ctypes.CDLL(named or (str(beside) if beside.exists() else SONAME))
    except OSError as e:
        raise ImportError(f"libreshard can't be loaded: {e}; install it (make install, ldconfig), or set RESHARD_LIBRARY to "
                          f"the path of {SONAME}") from None


_lib = _load()
for _name, (_result, *_arguments) in _CALLS.items():
    try:
        _f = getattr(_lib, "reshard_" + _name)
    except AttributeError:
        raise ImportError(f"{_lib._name} is older than this package: it has no reshard_{_name}") from None
    _f.restype, _f.argtypes = _result, _arguments


def get(name, *arguments):
    """A call that can't fail."""
    return getattr(_lib, "reshard_" + name)(*arguments)


def call(name, *arguments):
    """A call whose last parameter is the error: raises what it says."""
    e = error()
    r = getattr(_lib, "reshard_" + name)(*arguments, ctypes.byref(e))
    if r != 0:
        raise errors.OF_CODE.get(r, errors.Error)(e.text.decode(errors="replace") or get("error_name", r).decode())
