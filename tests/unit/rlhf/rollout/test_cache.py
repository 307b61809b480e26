import torch

from rlhf.rollout.cache import SlotCache


def numbered(tokens, *, num_heads=2, head_size=3):
    """Keys [1, K, N, d] that say whose they are: 100 x token + head; values are their negatives."""
    key_KN1 = 100.0 * torch.tensor(tokens)[None, :, None] + torch.arange(num_heads)[:, None, None]
    key = key_KN1.expand(-1, -1, head_size)[None].clone()
    return key, -key


def test_tokens_stand_where_they_were_aimed():
    cache = SlotCache(num_slots=3, capacity=5)
    assert cache.bytes_per_token == 0 and cache.get_seq_length() == 0
    for layer in (0, 1):
        cache.aim(torch.tensor([2, 0, 0]), torch.tensor([4, 0, 1]))
        key, value = numbered([7 + layer, 8, 9])
        given = cache.update(key, value, layer)
        assert given[0] is key and given[1] is value and cache.layer == layer
    key_SKLd, value_SKLd = cache.buffers[1]
    assert key_SKLd.shape == (3, 2, 5, 3) and cache.bytes_per_token == 2 * 2 * 3 * 4
    assert key_SKLd[2, :, 4, 0].tolist() == [800, 801]
    assert key_SKLd[0, :, :2, 2].tolist() == [[800, 900], [801, 901]]
    assert key_SKLd.count_nonzero() == 3 * 2 * 3 and torch.equal(value_SKLd, -key_SKLd)
    assert cache.buffers[0][0][2, :, 4, 0].tolist() == [700, 701]


def test_copy_and_reorder():
    cache = SlotCache(num_slots=4, capacity=3)
    cache.aim(torch.arange(4).repeat_interleave(3), torch.arange(3).repeat(4))
    cache.update(*numbered(range(12)), 0)
    cache.copy(1, [0, 3], length=2)
    tokens = (cache.buffers[0][0][:, 0, :, 0] / 100).tolist()
    assert tokens == [[3, 4, 2], [3, 4, 5], [6, 7, 8], [3, 4, 11]]
    cache.reorder([2, 0], length=3)
    tokens = (cache.buffers[0][0][:2, 1, :, 0] / 100).round().tolist()
    assert tokens == [[6, 7, 8], [3, 4, 2]]
    assert torch.equal(cache.buffers[0][1], -cache.buffers[0][0])
