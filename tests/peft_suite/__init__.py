"""PEFT's own test suite with inlay's methods in LoRA's place: `make test-peft PEFT=<a checkout of PEFT>`.

Nothing of PEFT's is copied here. Its test files are run as they are; a pytest plugin changes what they are run with.
See docs/peft-suite.md.
"""
