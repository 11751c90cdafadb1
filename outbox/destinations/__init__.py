"""One attempt over the network: send a request, say what came back."""
