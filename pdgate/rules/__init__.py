"""Pure judgements: deployment and facts in, findings out. No host, no file, no network is touched here."""
