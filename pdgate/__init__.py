"""pdgate: the gate a prefill/decode-disaggregated LLM deployment passes before anyone trusts it."""

__version__ = "0.4.0"
