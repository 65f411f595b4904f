"""UltraFuser on a GPU gives the same loss and tokens as on the CPU, with the specialists on one
device or on two.
"""

import pytest
import torch

pytest.importorskip("transformers", exc_type=ImportError)
from tests.methods.ultrafuser import fusers

pytestmark = pytest.mark.gpu
PLACES = {
    "one": ("cuda", "cuda"),
    "gate on the GPU": ("cuda", "cpu"),
    "gate on the CPU": ("cpu", "cuda"),
}


@pytest.mark.parametrize("places", PLACES)
def test_devices_change_nothing(places):
    inputs = fusers.batch(2)
    models = [fusers.specialist(s) for s in range(2)]
    fused = fusers.fuser(models).train_all()
    expected = fused(**inputs, want_logits=True)
    grads = torch.autograd.grad(
        expected.loss,
        list(fused.parameters()),
    )
    prompts = {name: value for name, value in inputs.items() if name.startswith("prompt")}
    tokens = fused.generate(**prompts, max_new_tokens=6, num_beams=2, pad_token_id=0)
    gate = {name: tensor.clone() for name, tensor in fused.gate.state_dict().items()}
    moved = fusers.fuser(
        [model.to(place) for model, place in zip(models, PLACES[places], strict=True)]
    ).train_all()
    moved.gate.load_state_dict(gate)
    got = moved(**inputs, want_logits=True)
    assert got.loss.device.type == PLACES[places][0]
    torch.testing.assert_close(
        got.loss.cpu(),
        expected.loss,
        rtol=1e-3,
        atol=1e-3,
    )
    torch.testing.assert_close(
        got.logits.cpu(),
        expected.logits,
        rtol=1e-2,
        atol=1e-2,
    )
    for ours, theirs in zip(
        torch.autograd.grad(
            got.loss,
            list(moved.parameters()),
        ),
        grads,
        strict=True,
    ):
        torch.testing.assert_close(
            ours.cpu(),
            theirs,
            rtol=2e-2,
            atol=1e-3,
        )
    assert torch.equal(
        moved.generate(**prompts, max_new_tokens=6, num_beams=2, pad_token_id=0).cpu(), tokens
    )


def test_narrow_specialists_on_one_device():
    models = [fusers.specialist(s).to("cuda", torch.bfloat16) for s in range(3)]
    fused = fusers.fuser(models).freeze_specialists()
    out = fused(**fusers.batch())
    out.loss.backward()
    for p in fused.specialists.parameters():
        assert p.grad is None
    assert fused.gate.score.weight.grad.abs().sum() > 0
    assert out.gate_weight.dtype == torch.float32
    inputs = {
        k: [t.cuda() for t in v] if isinstance(v, list) else v.cuda()
        for k, v in fusers.batch().items()
    }
    torch.testing.assert_close(
        fused(**inputs).loss, fusers.naive_loss(fused, inputs), rtol=3e-2, atol=3e-2
    )
