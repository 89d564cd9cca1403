"""What a learn must be, said again without the engine: one graph over the labelled runs, given the prefix as served."""

import torch
import torch.nn.functional as F

from riftco.adapters import LoraSpec
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.serve import Batch, Engine
from riftco.train.chunked import runs_of

V, LAYERS, H, K, D, WINDOW = 50, 2, 4, 2, 32, 48
SPEC = LoraSpec(rank=4, alpha=8)
HEAD = LoraSpec(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "up_proj", "lm_head"))


def decoder(seed=5):
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig("llama", V, 64, 64, LAYERS, H, K, D, 64, Rope(D, 1e4)))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6)  # attention that looks at something
    return model


def engine(spec=SPEC, slots=3, served=False, **options):
    """An engine with adapter "a" that has weights; its slots serve the base, or version 1 of it."""
    made = Engine(decoder(), slots=slots, window=WINDOW, **{"cache_dtype": "float32", "chunk": 8, **options})
    add(made, "a", spec)
    if served:
        for i in range(slots):
            made.use(i, {"a": 1.0})
    return made


def add(made, id, spec, seed=2):
    """An adapter with weights that matter."""
    state = dict(made.bank.create(id, spec, seed=seed).versions[0])
    made.bank.remove(id)
    generator = torch.Generator().manual_seed(seed)
    for name, t in state.items():
        if "lora_B" in name:
            state[name] = 0.2 * torch.randn(t.shape, generator=generator)
    made.bank.create(id, spec, state=state)


def tokens(n, seed=0):
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed))


def prefill(made, slot, ids):
    return made.decode(Batch.of(slot, len(made.slots[slot].tokens), ids)).logits


class OneGraph(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, position, old):
        """Logits [T, V] of tokens behind rows `old`: (k, v) [S, K, D] a layer; and the rows of these."""
        rows = []

        class Attends:
            def attend(self, layer, q, k, v, **_):
                rows.append((k[0], v[0]))
                k, v = (torch.cat([a, b[0]])[None] for a, b in zip(old[layer], (k, v)))
                T, S = q.shape[1], k.shape[1]
                see = torch.ones(T, S, dtype=torch.bool).tril(S - T)
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
                k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
                return F.scaled_dot_product_attention(q, k, v, attn_mask=see).transpose(1, 2)

        rotation = self.model.rotary(torch.arange(position, position + len(ids)))
        x = self.model.model.embed_tokens(ids[None])
        for layer in self.model.model.layers:
            x = layer(x, rotation, None, Attends())
        return self.model.lm_head(self.model.model.norm(x))[0], rows


def effective(model, spec, state, scale=1.0):
    """Every weight W + scale * B A, by name."""
    weights = {f"model.{name}": p for name, p in model.named_parameters()}
    for path in {name.split(".lora_")[0] for name in state}:
        a, b = state[f"{path}.lora_A.weight"], state[f"{path}.lora_B.weight"]
        name = f"model.{path}.weight"
        weights[name] = weights[name].detach() + scale * spec.alpha / spec.rank * (b @ a)
    return weights


def objective(made, lessons, served=False):
    """(loss, gradients by name) of the mean loss of (slot, prefix, ids, label, weight) lessons under the shadow."""
    adapter = made.bank.adapters["a"]
    newest = {name: p.detach().clone().requires_grad_() for name, p in made.bank.shadow("a").items()}
    stable = effective(made.model, adapter.spec, adapter.versions[0], 1.0 if served else 0.0)
    learning = effective(made.model, adapter.spec, newest)
    graph, total = OneGraph(made.model), torch.zeros(())
    count = sum(int((label >= 0).sum()) for _, _, _, label, _ in lessons)
    for slot, prefix, ids, label, weight in lessons:
        layers = [made.cache.layer(i) for i in range(LAYERS)]
        old = [tuple(t[slot, :prefix] for t in cache.dequantized(place)) for cache, place in layers]
        done = 0
        for start, end in runs_of(label):
            if start > done:  # as served
                with torch.no_grad():
                    _, rows = torch.func.functional_call(graph, stable, (ids[done:start], prefix + done, old))
                old = [tuple(torch.cat(pair) for pair in zip(a, b)) for a, b in zip(old, rows)]
            part = ids[start:end], prefix + start, old
            logits, _ = torch.func.functional_call(graph, learning, part)
            losses = F.cross_entropy(logits, label[start:end], reduction="none")
            total = total + (losses if weight is None else losses * weight[start:end]).sum() / count
            with torch.no_grad():  # what comes after it sees the run as served
                _, rows = torch.func.functional_call(graph, stable, part)
            old, done = [tuple(torch.cat(pair) for pair in zip(a, b)) for a, b in zip(old, rows)], end
    grads = torch.autograd.grad(total, list(newest.values()))
    return float(total.detach()), dict(zip(newest, grads))


class Seen:
    """The gradients that an adapter's one optimizer steps on."""

    def __init__(self, made, lr=1e-3):
        self.pupil, self.steps = made.learner.pupil("a", lr), []
        self.pupil.optimizer.register_step_pre_hook(self._see)

    def _see(self, *_):
        self.steps.append({name: p.grad.clone() for name, p in self.pupil.shadow.items()})


def agree(grads, wanted, bound=1e-4):
    """Cosine 1.0000 and norm ratio 0.9995 to 1.0005."""
    a, b = (torch.cat([t[name].double().flatten() for name in sorted(wanted)]) for t in (grads, wanted))
    cosine, ratio = float(a @ b / a.norm() / b.norm()), float(a.norm() / b.norm())
    assert b.norm() > 1e-3
    assert cosine > 1 - 5e-5, cosine
    assert abs(ratio - 1) < 5e-4, ratio
