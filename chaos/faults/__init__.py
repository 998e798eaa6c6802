"""One file per fault. A fault is data: six verbs, each a script for the faulted host or a judgement; chaos/injection.py runs them."""
