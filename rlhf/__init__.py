"""Shared library of the three stages; it knows no stage.

Shape legend. Tensors carry their logical shape as a suffix; 0-d tensors carry none.

    B  sequences of a micro-batch           N  preference pairs
    P  prompt tokens (left-padded)          R  response tokens (right-padded)
    T  tokens of a right-padded row         V  vocabulary
    D  hidden size                          S  sequences of a batch or tokens selected out of [B, T], flat
    H  query heads, K key heads, d their size
    C  tokens of a chunk                    Q  of a packed row's slots, those whose output is dropped
    U  columns of a packed row on one of the ranks that share it

Masks are bool, named by what is True, and made from lengths, never from token ids. Column i of a `*_BR` tensor is
response token i; column t of a `*_BT` tensor is token t of the row: `logprob_BT[:, t]` is the log-probability of
token t given the tokens before it. Log-probabilities, entropy and KL are in nats.
"""
