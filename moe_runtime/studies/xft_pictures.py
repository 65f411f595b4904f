"""XFT's own picture: the tokens of each text per expert. The others are in `pictures`."""

from moe_runtime.studies.pictures import COLOURS, figure_of


def shares(report):
    """Draw each text's share of tokens per routed expert, for the first, the middle and the last layer, of one seed."""
    share = report.share(0)  # seeds name their experts differently: their bars cannot be averaged
    L, R = share.shape[1:]
    layers = sorted({0, (L - 1) // 2, L - 1})
    width = 0.82 / len(report.tokens)
    figure, all_axes = figure_of(report, (max(7.0, 1.1 * R + 1.5), 1.3 + 2.1 * len(layers)), rows=len(layers))
    for axes, layer in zip(all_axes, layers):
        for i, (name, colour) in enumerate(zip(report.tokens, _cycle(len(report.tokens)))):
            places = [expert + (i - (len(report.tokens) - 1) / 2) * width for expert in range(R)]
            axes.bar(
                places, share[i, layer].tolist(), width, color=colour, label=name, edgecolor="white", linewidth=0.4
            )
        axes.axhline(1 / R, color="black", linestyle="--", linewidth=1)
        axes.set_xticks(range(R), range(1, R + 1))
        axes.set(ylabel=f"layer {report.layers[layer]}\nshare of tokens")
        axes.grid(axis="y", alpha=0.25)
    all_axes[-1].set_xlabel(f"routed expert (dashed: 1/{R}; seed {report.seeds[0]})")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _cycle(count: int):
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
