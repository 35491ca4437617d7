"""The independent proof: a chain of stages computes what a plain model, written here from the formulas, computes.

The textbook below holds the whole model in one process, in float64, with its full d-wide stream and full output
matrices, and shares no code with `protocol.model`: no module, no fused attention, no library norm. Its projections are
those of the paper (Ramasinghe et al. 2025, arXiv 2506.01260, section 4), on the stream with E_fixed in it. The chain
runs stage by stage as peers do: each stage sees coordinates and ids, and returns the gradient of the coordinates.
Loss and every gradient must agree: to 1e-10 in float64, to 1e-5 in float32 (the design's bar).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from rounding import FLOAT32_OVER_FLOAT64, SAME_MODEL, gamma, magnitude, within

import protocol.model.layers
from compression.basis import inside, random_basis
from compression.boundary import FIXED_EMBEDDING_STD
from compression.seeded import normal
from protocol.config import RunConfig, parse_config
from protocol.model.stage import Stage, confinement, whole_model_names

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]

SEED, BATCH, LENGTH, VOCAB, DIM, HEADS, RANK, BASE, EPSILON = 11, 2, 7, 257, 24, 4, 5, 100.0, 1e-3
Weights = dict[str, torch.Tensor]
FORMS = ("bottleneck", "reparam", "none")


def run_config(
    form: str,
    fixed: bool = True,
    stage_embeddings: bool = True,
    kv_heads: int = 2,
    qk_norm: bool = True,
    layers: int = 3,
    stages: int = 3,
    scaled: bool = False,
) -> RunConfig:
    return parse_config(
        {
            "seed": SEED,
            "model": {
                "dim": DIM, "layers": layers, "heads": HEADS, "kv_heads": kv_heads, "hidden": 20,
                "rope_base": BASE, "qk_norm": qk_norm, "norm_epsilon": EPSILON,
            },
            "boundary": {
                "form": form, "rank": RANK, "fixed_embedding": fixed, "stage_embeddings": stage_embeddings,
                "scaled_basis": scaled,
            },
            "data": {"vocab_size": VOCAB},
            "train": {"microbatch_size": BATCH, "sequence_length": LENGTH},
            "pipeline": {"stages": stages},
        },
        "test",
    )  # fmt: skip


# The textbook


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON) * gain


def rope(x_THE: torch.Tensor) -> torch.Tensor:
    """Number i and number i + E/2 are a point in the plane; position t turns it by t * base^(-2i/E)."""
    length, _, width = x_THE.shape
    turned = torch.empty_like(x_THE)
    for i in range(width // 2):
        angle = torch.arange(length, dtype=torch.float64)[:, None] * BASE ** (-2 * i / width)
        a, b = x_THE[..., i], x_THE[..., i + width // 2]
        turned[..., i] = a * angle.cos() - b * angle.sin()
        turned[..., i + width // 2] = a * angle.sin() + b * angle.cos()
    return turned


@dataclass
class Textbook:
    """One model, one process, float64. `weights` are the run's parameters by their names in the whole model."""

    config: RunConfig
    weights: Weights

    def __post_init__(self) -> None:
        boundary = self.config.boundary
        self.U_DK = random_basis(DIM, RANK, SEED).double()
        self.scale = math.sqrt(DIM / RANK) if boundary.scaled_basis else 1.0
        fixed = normal((VOCAB, DIM), FIXED_EMBEDDING_STD, SEED, "fixed_embedding").double()
        self.E_fixed = fixed if boundary.fixed_embedding else torch.zeros(VOCAB, DIM, dtype=torch.float64)
        self.stages = self.config.pipeline.stages
        self.per_stage = self.config.model.layers // self.stages

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean over sequences and positions of -log p(next id)."""
        total = torch.zeros((), dtype=torch.float64)
        for row in ids:
            x_TD = self.stream(row[:-1])
            logits_TV = rms_norm(x_TD, self.weights["norm.weight"]) @ self.weights["head.weight"].T
            for t, target in enumerate(row[1:]):
                total = total + torch.log(torch.exp(logits_TV[t]).sum()) - logits_TV[t, target]
        return total / (BATCH * LENGTH)

    def stream(self, t: torch.Tensor) -> torch.Tensor:
        """The residual stream `[T, D]` of one sequence, before the last norm."""
        x_TD = self.E_fixed[t] + self.embedding("embedding.weight", stage=0)[t]
        for stage in range(self.stages):
            if stage > 0:
                x_TD = self.cross(x_TD, t)
                if self.config.boundary.stage_embeddings:
                    x_TD = x_TD + self.embedding(f"stage{stage}.embedding.weight", stage)[t]
            for layer in range(stage * self.per_stage, (stage + 1) * self.per_stage):
                x_TD = x_TD + self.attention(layer, stage, x_TD)
                x_TD = x_TD + self.feed_forward(layer, stage, x_TD)
        return x_TD

    def cross(self, x_TD: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Where x - E_fixed[t] is in span(U) already (`reparam`, `projected`), the textbook has no boundary at all."""
        if self.config.boundary.form != "bottleneck":
            return x_TD
        return (x_TD - self.E_fixed[t]) @ self.U_DK @ self.U_DK.T + self.E_fixed[t]

    def confined(self, stage: int) -> bool:
        return self.config.boundary.form == "reparam" and stage < self.stages - 1

    def embedding(self, name: str, stage: int) -> torch.Tensor:
        return self.scale * self.weights[name] @ self.U_DK.T if self.confined(stage) else self.weights[name]

    def writing(self, name: str, stage: int) -> torch.Tensor:
        """The output matrix `[D, in]`: W = U @ Z where the writes are confined."""
        return self.scale * self.U_DK @ self.weights[name] if self.confined(stage) else self.weights[name]

    def attention(self, layer: int, stage: int, x_TD: torch.Tensor) -> torch.Tensor:
        model, w, at = self.config.model, self.weights, f"layers.{layer}.attention"
        h_TD = rms_norm(x_TD, w[f"layers.{layer}.attention_norm.weight"])
        width = DIM // HEADS
        q = (h_TD @ w[f"{at}.query.weight"].T).reshape(LENGTH, HEADS, width)
        k = (h_TD @ w[f"{at}.key.weight"].T).reshape(LENGTH, model.kv_heads, width)
        v = (h_TD @ w[f"{at}.value.weight"].T).reshape(LENGTH, model.kv_heads, width)
        if model.qk_norm:
            q, k = rms_norm(q, w[f"{at}.query_norm.weight"]), rms_norm(k, w[f"{at}.key_norm.weight"])
        q, k = rope(q), rope(k)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // model.kv_heads)
            scores = q[:, head] @ k[:, group].T / math.sqrt(width)
            seen = torch.tril(torch.exp(scores))
            mixed.append(seen / seen.sum(-1, keepdim=True) @ v[:, group])
        return torch.cat(mixed, -1) @ self.writing(f"{at}.output.weight", stage).T

    def feed_forward(self, layer: int, stage: int, x_TD: torch.Tensor) -> torch.Tensor:
        w, at = self.weights, f"layers.{layer}.feed_forward"
        h_TD = rms_norm(x_TD, w[f"layers.{layer}.feed_forward_norm.weight"])
        gate = h_TD @ w[f"{at}.gate.weight"].T
        hidden = gate / (1 + torch.exp(-gate)) * (h_TD @ w[f"{at}.up.weight"].T)
        return hidden @ self.writing(f"{at}.output.weight", stage).T


# The chain of stages


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stages compute in float64 throughout: they round rotary positions and logits to float32 on purpose.

    The angles are replaced too; `test_rotary_angles` and the float32 test below look at the real ones.
    """
    to_float32 = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float32(x))
    monkeypatch.setattr(protocol.model.layers, "rotary_angles", exact_angles)


def exact_angles(length: int, width: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    turns = [[t * base ** (-2 * i / width) for i in range(width // 2)] for t in range(length)]
    angles = torch.tensor(turns, dtype=torch.float64)
    return angles.cos(), angles.sin()


def built(config: RunConfig) -> list[Stage]:
    """The stages with telling weights: as they are drawn, output matrices are 0 and gains 1."""
    stages = [Stage(config, index) for index in range(config.pipeline.stages)]
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                noise = torch.randn(parameter.shape, generator=drawn)
                parameter.add_(noise / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.3 * noise)
    return stages


def weights_of(stages: list[Stage]) -> Weights:
    named = {name: p for stage in stages for name, p in whole_model_names(stage).items()}
    return {name: p.detach().double().requires_grad_() for name, p in named.items()}


def chain(stages: list[Stage], ids: torch.Tensor) -> tuple[float, Weights]:
    """Loss and gradients, each stage with a graph of its own and only coordinates and their gradients between."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    arrived: list[torch.Tensor | None] = [None]
    outputs = []
    for stage in stages:
        outputs.append(stage(inputs, arrived[-1]))
        arrived.append(outputs[-1].detach().requires_grad_())
    outputs[-1] = stages[-1].loss(inputs, outputs[-1], targets)
    gradient = None
    for output, came in zip(reversed(outputs), reversed(arrived[:-1]), strict=True):
        output.backward(gradient)
        gradient = None if came is None else came.grad
    named = {name: p for stage in stages for name, p in whole_model_names(stage).items()}
    return float(outputs[-1].detach()), {name: p.grad for name, p in named.items() if p.grad is not None}


def sample() -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    ids[0, :3] = torch.tensor([VOCAB - 1, 0, VOCAB - 1])  # the last id, and one that comes twice
    return ids


def differences(config: RunConfig, precision: torch.dtype, textbook: type[Textbook] = Textbook) -> tuple[float, float]:
    """The relative difference of the loss, and the largest of a gradient."""
    stages = [stage.to(precision) for stage in built(config)]
    loss, gradients = chain(stages, sample())
    weights = weights_of(stages)
    expected = textbook(config, weights).loss(sample())
    expected.backward()
    assert set(gradients) == set(weights)
    relative = {}
    for name, weight in weights.items():
        assert weight.grad is not None and weight.grad.norm() > 1e-6, name
        relative[name] = float((gradients[name] - weight.grad).norm() / weight.grad.norm())
    return abs(loss - float(expected.detach())) / float(expected.detach()), max(relative.values())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("fixed", "stage_embeddings"), list(product([True, False], repeat=2)))
@pytest.mark.parametrize(("kv_heads", "qk_norm"), list(product([4, 2, 1], [True, False])))
def test_loss_and_gradients_equal_the_textbooks(
    form: str, fixed: bool, stage_embeddings: bool, kv_heads: int, qk_norm: bool
) -> None:
    loss, gradient = differences(run_config(form, fixed, stage_embeddings, kv_heads, qk_norm), torch.float64)
    assert loss < SAME_MODEL and gradient < SAME_MODEL


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stages", [1, 2, 6])
def test_however_the_model_is_cut(form: str, stages: int) -> None:
    loss, gradient = differences(run_config(form, layers=6, stages=stages), torch.float64)
    assert loss < SAME_MODEL and gradient < SAME_MODEL


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("form", ["bottleneck", "reparam"])
def test_a_scaled_basis(form: str) -> None:
    loss, gradient = differences(run_config(form, scaled=True), torch.float64)
    assert loss < SAME_MODEL and gradient < SAME_MODEL


@pytest.mark.usefixtures("double")
def test_projected_equals_a_model_without_any_boundary() -> None:
    """If weights lie in span(U), then the loss is that of the plain model, and so are all gradients inside the span.

    But for that U is orthonormal to float32, and its projection stands in the chain only, once for each boundary.
    """
    stages = [stage.double() for stage in built(run_config("projected"))]
    confined = {name: c for stage in stages if (c := confinement(stage)) for name in c.axes}
    named = {name: p for stage in stages for name, p in whole_model_names(stage).items()}

    def followed(name: str, x: torch.Tensor) -> torch.Tensor:
        return inside(x, confined[name].basis_DK.double(), confined[name].axes[name]) if name in confined else x

    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(followed(name, parameter))
    loss, gradients = chain(stages, sample())
    weights = weights_of(stages)
    expected = Textbook(run_config("projected"), weights).loss(sample())
    expected.backward()
    basis_error = 2 * gamma(2) * float(torch.linalg.matrix_norm(random_basis(DIM, RANK, SEED).abs(), 2)) ** 2
    assert len(confined) == 6 and loss == pytest.approx(float(expected.detach()), rel=basis_error)
    for name, weight in weights.items():
        assert weight.grad is not None and weight.grad.norm() > 1e-6, name
        difference = followed(name, gradients[name]) - followed(name, weight.grad)
        assert difference.norm() < 10 * basis_error * weight.grad.norm(), name


@pytest.mark.parametrize("form", FORMS)
def test_in_float32_to_the_designs_bar(form: str, request: pytest.FixtureRequest) -> None:
    """And no further off than rounding is: that of float64, scaled; it is alike to within a factor of 2."""
    loss, gradient = differences(run_config(form), torch.float32)
    request.getfixturevalue("double")
    rounding = FLOAT32_OVER_FLOAT64 * max(differences(run_config(form), torch.float64))
    assert max(loss, gradient) < min(1e-5, 10 * rounding)


class Unconfined(Textbook):
    def cross(self, x_TD: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x_TD


class ProjectsTheWholeStream(Textbook):
    def cross(self, x_TD: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x_TD @ self.U_DK @ self.U_DK.T


class Interleaved(Textbook):
    def attention(self, layer: int, stage: int, x_TD: torch.Tensor) -> torch.Tensor:
        grouped = self.config.model.kv_heads
        order = [h % grouped * (HEADS // grouped) + h // grouped for h in range(HEADS)]
        rows = [h * (DIM // HEADS) + e for h in order for e in range(DIM // HEADS)]
        name = f"layers.{layer}.attention.query.weight"
        shuffled = Textbook(self.config, {**self.weights, name: self.weights[name][rows]})
        return shuffled.attention(layer, stage, x_TD)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("form", "wrong"), [("bottleneck", Unconfined), ("bottleneck", ProjectsTheWholeStream), ("none", Interleaved)]
)
def test_another_model_is_told_apart(form: str, wrong: type[Textbook]) -> None:
    """The comparison can fail: leave the boundary out, project E_fixed with it, or group the heads otherwise."""
    loss, gradient = differences(run_config(form), torch.float64, wrong)
    assert loss > 1e-6 and gradient > 1e-3


@pytest.mark.usefixtures("double")
def test_confined_writes_lie_in_the_span() -> None:
    """Form `reparam`: sending c = (x - E_fixed[t]) @ U, as the paper writes it, gives the stage's coordinates."""
    config = run_config("reparam", layers=4, stages=2)
    stages = [stage.double() for stage in built(config)]
    whole = Textbook(config, weights_of(stages))
    t = sample()[0, :-1]
    x_TD = whole.E_fixed[t] + whole.embedding("embedding.weight", 0)[t]
    for layer in range(2):
        x_TD = x_TD + whole.attention(layer, 0, x_TD)
        x_TD = x_TD + whole.feed_forward(layer, 0, x_TD)
    r_TD = x_TD - whole.E_fixed[t]
    c_TK, u_DK = stages[0](t[None], None)[0], whole.U_DK
    # U is orthonormal to float32: U^T U is off by the rounding of two factors. All else is rounded in float64.
    more = SAME_MODEL * c_TK.norm()
    assert within(c_TK @ u_DK.T, r_TD, more)
    assert within(r_TD @ u_DK, c_TK, gamma(2) * magnitude(c_TK, u_DK.T, u_DK) + more)
    assert within(r_TD @ u_DK @ u_DK.T, r_TD, gamma(2) * magnitude(c_TK, u_DK.T, u_DK, u_DK.T) + more)


@pytest.mark.parametrize("base", [100.0, 10000.0])
def test_rotary_angles(base: float) -> None:
    cos, sin = protocol.model.layers.rotary_angles(LENGTH, 6, base, torch.device("cpu"))
    expected = exact_angles(LENGTH, 6, base, torch.device("cpu"))
    assert cos.dtype == sin.dtype == torch.float32
    # A power, good to a few units in the last place, and two products; neither curve is steeper than 1.
    error = gamma(8) * (1 + torch.arange(LENGTH, dtype=torch.float64))[:, None]
    assert within(cos, expected[0], error) and within(sin, expected[1], error)
