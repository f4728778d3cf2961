"""A GPU of fake tensors: PyTorch's own code runs with shapes and devices, nothing is computed and no memory is taken.

`install()` gives this process the device type "fakegpu", for good: call it in a process of its own. `Memory` counts the
bytes that live on each device. Host memory is the device "cpu" as always. A build of PyTorch without CUDA cannot run a
backward pass on fake tensors of "cuda"; Python backends (torch.utils.backend_registration) can.
"""

import contextlib
import importlib
import weakref
from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

GPU = "fakegpu"
KERNELS = torch.library.Library("aten", "IMPL")
GRANULE = 512  # bytes; PyTorch's allocators on GPUs round up to it


class Event:
    def __init__(self, *_args, **_options):
        pass

    def record(self, _stream=None):
        return self

    def wait(self, _stream=None):
        pass

    def synchronize(self):
        pass


class Stream:
    def __init__(self, *_args, **_options):
        pass

    @property
    def device(self):
        return torch.device(GPU, 0)

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass


class Backend(_DummyBackendModule):
    """Stands for the module torch.fakegpu, and answers what FSDP asks of torch.cuda."""

    Stream, Event = Stream, Event

    def __init__(self):
        self._stream = Stream()

    def current_stream(self, _device=None):
        return self._stream

    def default_stream(self, _device=None):
        return self._stream

    def stream(self, _stream):
        return contextlib.nullcontext()

    def device(self, _device):
        return contextlib.nullcontext()

    def synchronize(self, _device=None):
        pass

    def set_device(self, _device):
        pass

    def get_rng_state(self, _device=None):
        return torch.get_rng_state()

    def set_rng_state(self, _state, _device=None):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def install():
    _setup_privateuseone_for_python_backend(GPU, backend_module=Backend())
    # A device without this kernel would compute it of six parts, each as large as the activations.
    KERNELS.impl("silu_backward", lambda gradient, inputs: torch.empty_like(inputs), "PrivateUse1")
    make = torch.tensor

    def tensor(data, *, device=None, **options):  # torch.tensor itself fills memory of the device
        made = make(data, **options)
        return made if device is None else made.to(device)

    torch.tensor = tensor
    importlib.import_module("torch.distributed._tools.fake_collectives")  # registers collectives for fake tensors


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that are seen, and their peak since `reset`, by type of device."""

    def __init__(self):
        super().__init__()
        self.now, self.peak = defaultdict(int), defaultdict(int)
        self._known = {}  # (weak reference, bytes, type of device) by address of a storage
        self._resize = torch.UntypedStorage.resize_

    def reset(self):
        self.peak.clear()
        self.peak.update(self.now)

    def __enter__(self):
        def resize_(storage, size):
            result = self._resize(storage, size)
            if storage._cdata in self._known:
                self._note(storage, self._known[storage._cdata][2])  # a fake storage itself is on "meta"
            return result

        torch.UntypedStorage.resize_ = resize_  # FSDP frees gathered weights by it
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.torch_attn._varlen_attn_backward.default:
            self._passing(args[1].device.type, workspace_bytes(*args[1:4]))
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                each = getattr(each, "_local_tensor", each)
                self._note(each.untyped_storage(), each.device.type)
        return result

    def _note(self, storage, kind):
        key = storage._cdata
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        reference, old, _ = self._known.get(key, (None, 0, kind))
        if reference is None or reference() is not storage:
            if reference is not None:
                self._forget(reference)
            reference, old = weakref.KeyedRef(storage, self._forget, key), 0
        self._known[key] = reference, size, kind
        self.now[kind] += size - old
        self.peak[kind] = max(self.peak[kind], self.now[kind])

    def _forget(self, reference):
        if self._known.get(reference.key, (None,))[0] is reference:
            _, size, kind = self._known.pop(reference.key)
            self.now[kind] -= size

    def _passing(self, kind, size):
        self.peak[kind] = max(self.peak[kind], self.now[kind] + size)


def workspace_bytes(query_LHD, key_KHD, value_KHD):
    """Returns the bytes that FlashAttention 2 takes during its backward pass, and its fake version does not.

    They are those of a float32 gradient of the queries and, where heads share keys, of gradients of keys and values for
    each head (mha_varlen_bwd, flash_api.cpp).
    """
    heads, width = query_LHD.shape[1:]
    shared = 0 if key_KHD.shape[1] == heads else 2 * 2 * len(key_KHD) * heads * width
    return 4 * (len(query_LHD) + 128) * heads * (width + 1) + shared + query_LHD.numel() * 2
