"""What can be read off models without training them: similarity of layers, distance of attention.

cka.py        linear centred kernel alignment, unbiased, over minibatches
features.py   what leaves every block, as Gram matrices
distance.py   how far attention reaches, from its weights
windows.py    the positions of tokens in Swin's windows
attention.py  the attention weights of a model, block by block

Measures only: `inlay.workflow.explain` finds models and data for them, `inlay.report.charts` draws them.
"""
