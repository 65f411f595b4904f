"""Settings of XFT's router: the paper's (Sec. 3.1), and those of the released code.

docs/papers/xft-official.md lists the differences (X1 to X4).
"""

PRESETS = {
    "xft-paper": {
        "gate": "xft",
        "router": "linear",
        "noisy_gate": False,
        "balance_loss": "none",
        "balance_loss_coef": 0.0,
        "load_quirk": False,
    },
    "xft-official": {
        "gate": "xft",
        "router": "mlp",
        "noisy_gate": True,
        "balance_loss": "cv2",
        "balance_loss_coef": 0.01,
        "load_quirk": True,
    },
}
