"""The suites: which cases are measured together, and what each must reach on a GPU with CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .goals import AtMost, AtMostShare, CopyShare, Faster, FlopRate, Goal, Leaner, systems_of

WORKER = "benchmarks.worker"
_FIRST_CALLS = "benchmarks.compile_worker"
_GPT2_LAYERS = 12


@dataclass(frozen=True)
class Row:
    """A case of a suite. A case that its worker does not have is left out."""

    case: str
    goals: tuple[Goal, ...]

    @property
    def systems(self) -> frozenset[str]:
        """What has to be measured."""
        return frozenset().union(*(systems_of(goal) for goal in self.goals))


@dataclass(frozen=True)
class Suite:
    """Cases that are measured together.

    Attributes:
        medians: goals for the median over all rows.
        worker: the module whose process measures; one that is not `worker` has other cases.
        timeout_s: for each case.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    medians: tuple[AtMostShare, ...] = ()
    worker: str = WORKER
    timeout_s: float = 180.0


def _inductor(factor: float, *, stream: bool = False) -> Faster:
    return Faster("inductor", factor, "Inductor", "stream" if stream else "kernel")


def _cublas() -> Faster:
    return Faster("eager", 0.8, "cuBLAS")


def _onnxruntime(factor: float) -> Faster:
    label = "ONNX Runtime WebGPU"
    return Faster("onnxruntime_webgpu", factor, label, "stream", needs_cuda=False)


def _tinygrad() -> Faster:
    return Faster("tinygrad_webgpu", 8.0, "tinygrad WebGPU", "stream", needs_cuda=False)


def _each(goals: Mapping[str, Goal | tuple[Goal, ...]]) -> tuple[Row, ...]:
    return tuple(
        Row(case, goal if isinstance(goal, tuple) else (goal,)) for case, goal in goals.items()
    )


def _same(goal: Goal, cases: Iterable[str]) -> tuple[Row, ...]:
    return tuple(Row(case, (goal,)) for case in cases)


def _first_call() -> Iterator[Goal]:
    for system, label in PROVIDERS.items():
        yield AtMostShare("cold_s", 0.5, f"cold, {label}", system)
        yield AtMostShare("second_s", 0.35, f"second process, {label}", system)
        yield AtMost("second_own_s", 1.0, "s", f"of ours in the second, {label}", system)


PROVIDERS = {"wgpu": "wgpu-native", "wgpudawn": "Dawn"}
_COMPILED = (
    *("swin_8", "lstm", "llama_512", "llama_512_f16", "llama_4x128_bf16", "resnet50_32_f16"),
    *("deeplab_2", "efficientnet_8", "convnext_8", "unet_4", "t5_4x128"),
    *("gpt2_step", "resnet50_16_step", "vit_8_step"),
)
# Seconds on two cores, the least of wall and CPU time: others may use the machine.
_ON_SOFTWARE = {"demo": 3.0, "tiny_unet": 3.0, "generate": 8.0, "readme_step": 6.0}
_MODELS = ("gpt2", "bert", "vit", "resnet50")
_BEATEN = (
    "softmax",
    "layer_norm",
    "rms_norm",
    "layer_norm_softmax",
    "cross_entropy",
    "gelu_chain",
)
_ORDERS = ("topk_rows", "topk_vocabulary", "argsort", "sort_rows", "median")
_PRODUCTS = (
    "matmul",
    "linear_768_768",
    "linear_768_3072",
    "linear_3072_768",
    "matrix_vector",
    "linear_1024",
    "batched",
)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "rows",
            "Streaming kernels",
            (
                Row("add", (CopyShare(0.97),)),
                *_same(_inductor(1.1), _BEATEN),
                *_same(CopyShare(0.9), ("column_sum", "full_sum", "few_rows")),
            ),
        ),
        Suite("orders", "Sorting and selection", _same(Faster("eager", 0.77, "CUDA"), _ORDERS)),
        Suite(
            "products",
            "Matrix products",
            (*_same(_cublas(), _PRODUCTS), Row("matmul_f16", (FlopRate(40e12),))),
        ),
        Suite(
            "attention",
            "Attention",
            _each({"attention": Faster("eager", 0.8, "PyTorch's best f32 SDPA")}),
        ),
        Suite(
            "convolutions",
            "ResNet-50's convolutions",
            _same(Faster("eager", 0.8, "cuDNN"), ("convolutions_8", "convolutions_32")),
        ),
        Suite("models", "Models", _same(_inductor(1.0, stream=True), _MODELS)),
        Suite(
            "decode",
            "Decoding a token",
            _each({"decode": (Faster("eager", 2.0, "CUDA eager", "stream"), CopyShare(0.55))}),
        ),
        Suite(
            "peers",
            "Other WebGPU systems",
            (
                *_same(_onnxruntime(5.0), ("gpt2", "bert", "vit")),
                Row("resnet50", (_onnxruntime(1.5),)),
                *_same(_tinygrad(), ("matmul", "layer_norm_softmax", "mlp")),
            ),
        ),
        Suite(
            "runtime",
            "Dispatches and the host",
            _each(
                {
                    "gpt2": AtMost("dispatches", 7 * _GPT2_LAYERS + 4, what="dispatches"),
                    "dispatch_chain": AtMost(
                        "host_s_per_dispatch", 1.2, "µs", "of host time per dispatch"
                    ),
                }
            ),
        ),
        Suite(
            "compile",
            "First call",
            tuple(Row(case, tuple(_first_call())) for case in _COMPILED),
            tuple(
                AtMostShare("cold_s", 0.35, f"cold, median, {label}", system)
                for system, label in PROVIDERS.items()
            ),
            _FIRST_CALLS,
            timeout_s=500.0,
        ),
        Suite(
            "compile-software",
            "First call, software",
            _each(
                {
                    case: AtMost("least_s", limit, "s", "cold", "wgpu")
                    for case, limit in _ON_SOFTWARE.items()
                }
            ),
            worker=_FIRST_CALLS,
        ),
        Suite("memory", "Peak memory", _same(Leaner("eager", 1.1, "eager CUDA"), _MODELS)),
    )
}


def suite_of(case: str, names: Iterable[str]) -> Suite:
    """The first of these suites that has the case."""
    return next(SUITES[name] for name in names if case in {row.case for row in SUITES[name].rows})


def rows_of(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """The systems that suites need, by case, in order; a case that several name comes once."""
    found: dict[str, frozenset[str]] = {}
    for name in names:
        for row in SUITES[name].rows:
            found[row.case] = found.get(row.case, frozenset()) | row.systems
    return found
