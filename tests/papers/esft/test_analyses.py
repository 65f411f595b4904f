"""papers/esft/analyses.py and counts.py: what the figures show, on real routing
and on tiny models.
"""

import html.parser
import json

import pytest
import torch

from moe_runtime.methods.esft.recorder import GateRecorder
from moe_runtime.methods.esft.scores import ExpertScores
from moe_runtime.methods.esft.selection import ExpertSelection, select_experts
from papers.esft import analyses
from papers.esft import counts as esft_counts
from tests.hf import tiny
from tests.hf.dropin.test_layers import TEXTS, TOKENIZER, stock
from tests.methods.esft.test_selection import LAYERS, TASKS, published, scores_of, sums_of


@pytest.fixture(scope="module")
def real() -> dict[str, ExpertScores]:
    return {task: ExpertScores.from_sums(sums_of(task)) for task in TASKS}


def same_after_json(result) -> None:
    assert type(result)(**json.loads(json.dumps(result.to_dict()))).to_dict() == json.loads(
        json.dumps(result.to_dict())
    )


# Fig. 2
def test_gate_mass_by_hand():
    mass = analyses.gate_mass({"a": scores_of([0.1, 0.3, 0.0, 0.0], [0.0, 0.1, 0.1, 0.2])})
    assert mass.share == [pytest.approx([(0.75 + 0.5) / 2, (0.25 + 0.25) / 2, 0.125, 0])]
    assert mass.cumulative == [pytest.approx([0.625, 0.875, 1, 1])]
    assert mass.share_sd == [pytest.approx([0.125, 0, 0.125, 0])]
    assert mass.cumulative_sd == [pytest.approx([0.125, 0.125, 0, 0])]
    assert (
        mass.experts_for(0.5) == [1]
        and mass.experts_for(0.63) == [2]
        and mass.experts_for(1.0) == [3]
    )
    same_after_json(mass)


# Fig. 4
def test_counts_are_those_of_the_selections(real):
    selections = {task: select_experts(scores, 0.2, "token") for task, scores in real.items()}
    found = analyses.expert_counts(selections, 64)
    assert list(found.layers) == list(LAYERS)
    for task, row, share in zip(TASKS, found.counts, found.shares, strict=True):
        places = published(task, "config_token_p0.2") > 0
        assert sum(row) == pytest.approx(int(places.sum()), abs=1) and share == pytest.approx(
            sum(row) / 26 / 64
        )
    same_after_json(found)
    some = analyses.expert_counts({"a": ExpertSelection(experts={2: (0, 1)})}, 4, layers=[3, 2])
    assert some.layers == [2, 3] and some.counts == [[2, 0]]


# Fig. 9
@pytest.mark.parametrize("kind", ["qwen3_moe", "ours"])
def test_token_shares_are_the_slots_on_trained_experts(kind):
    if kind == "ours":
        model = tiny.upcycled(changes={"vocab_size": len(TOKENIZER)})
    else:
        model = stock(kind)
    model.train()
    selection = ExpertSelection(experts={0: (1, 2), 1: (3,)})
    texts = [", ".join(TEXTS[:5]), TEXTS[7]]
    found = analyses.token_shares(model, TOKENIZER, texts, selection)
    assert model.training
    for text, shares in zip(texts, found, strict=True):
        tokens = TOKENIZER(text)["input_ids"]
        calls = []
        assert "".join(shares.pieces) == text and len(shares.pieces) == len(tokens)
        with GateRecorder(model.eval(), see=calls.append), torch.no_grad():
            model(torch.tensor([tokens]))
        slots = [
            sum(
                int(e in selection.experts[call.layer])
                for call in calls
                for e in call.topk_idx[t].tolist()
            )
            for t in range(len(tokens))
        ]
        assert shares.slots == sum(call.topk_idx.shape[1] - call.num_shared for call in calls)
        assert (
            shares.shares == pytest.approx([n / shares.slots for n in slots])
            and 0 < shares.mean < 1
        )
        model.train()
    everything = ExpertSelection(
        experts={n: range(int(kind == "ours"), 4 if kind == "ours" else 8) for n in (0, 1)}
    )
    assert set(analyses.token_shares(model, TOKENIZER, texts[:1], everything)[0].shares) == {1.0}
    nothing = analyses.token_shares(model, TOKENIZER, texts[:1], ExpertSelection(experts={}))
    assert set(nothing[0].shares) == {0.0}


class Reader(html.parser.HTMLParser):
    """Reads a page back: the spans of each pre, and every tag's attributes."""

    def __init__(self):
        super().__init__()
        self.stack = []
        self.spans = []
        self.attributes = []
        self.headings = []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *one) for one in attrs]
        if tag not in ("meta", "br"):
            self.stack.append(tag)
        if tag == "span" and "pre" in self.stack:
            self.spans.append([dict(attrs)["style"], ""])

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "span" and "pre" in self.stack:
            self.spans[-1][1] += data
        if self.stack and self.stack[-1] in ("h1", "h2"):
            self.headings.append(data)


def test_the_page_says_what_was_measured_and_escapes_it(tmp_path):
    pieces = ["if a < b && c:\n", "\t</pre><script>alert('x')</script>", "", '"\x00"', "é\u00a0日"]
    shares = analyses.TokenShares(pieces=pieces, shares=[0.0, 0.5, 0.25, 1.0, 0.125], slots=8)
    path = tmp_path / "tokens.html"
    analyses.write_page(
        path, {"code <1>": [shares, shares], "law": [shares]}, title="A & B", note="p = 0.2 < 1"
    )
    text = path.read_text("utf-8")
    reader = Reader()
    reader.feed(text)
    assert not reader.stack and reader.headings == ["A & B", "code <1>", "law"]
    want = [
        (f"--s:{share:.3f}", piece)
        for share, piece in zip(shares.shares, pieces, strict=True)
        if piece
    ]
    want[2] = ("--s:1.000", '"\N{REPLACEMENT CHARACTER}"')
    assert [tuple(span) for span in reader.spans] == want * 3
    assert "<script" not in text and "p = 0.2 &lt; 1" in text and 'title="50% of 8"' in text
    # self-contained, and for light and dark
    assert (
        not any(name in ("src", "href") for _, name, _ in reader.attributes) and "url(" not in text
    )
    assert "prefers-color-scheme: dark" in text


# pictures
def drawn(figure, tmp_path) -> str:
    """All text of a figure that can be saved."""
    figure.savefig(tmp_path / "figure.png", dpi=40)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    return " ".join(
        t.get_text() for t in figure.findobj(lambda artist: hasattr(artist, "get_text"))
    )


def test_pictures_show_their_numbers(real, tmp_path):
    text = drawn(esft_counts.gate_mass(analyses.gate_mass(real)), tmp_path)
    assert all(task in text for task in TASKS) and "balanced" in text
    counts = analyses.ExpertCounts(tasks=["law"], layers=[1, 2], counts=[[3, 17]], num_experts=64)
    text = drawn(esft_counts.expert_counts(counts), tmp_path)
    assert "17" in text and "15.6% of all" in text
    many = analyses.gate_mass({str(i): scores_of([0.5, 0.5]) for i in range(12)})
    assert len(esft_counts.gate_mass(many).axes[0].get_lines()) == 13
