// Channels of K with more bits than the others of a group of tokens: boosts.py, compiled. The high bits of their codes
// lie among the others'; the low ones are codes of two bits, as K's lie, of these channels alone.
#pragma once

constexpr int BOOST_BITS = 2;
constexpr float BOOST_STEPS = 1 << BOOST_BITS;
constexpr int BOOSTS = DIM_MOST / 2; // of a group at most

INLINE int boost_words(const kvplan_tensor &t) { return (t.boosts * BOOST_BITS + 31) / 32; }
INLINE const uint8_t *boost_codes(const kvplan_tensor &t, const uint8_t *slab, int64_t in_page) {
  return slab + t.boost + in_page * 4 * boost_words(t);
}
// Zeros past the last, up to a multiple of sixteen.
INLINE const uint8_t *boost_channels(const kvplan_tensor &t, const uint8_t *slab, int64_t in_page) {
  return slab + t.boost_channel + in_page / t.group * boost_words(t) * LANES;
}

// How boosted channels are coded.
INLINE kvplan_tensor boosted_tensor(const kvplan_tensor &t) {
  kvplan_tensor fine = t;
  fine.bits += BOOST_BITS;
  fine.steps = BOOST_STEPS * (t.steps + 1) - 1;
  fine.extent = BOOST_STEPS * (t.extent + 1) - 1;
  fine.centre = BOOST_STEPS * t.centre;
  return fine;
}
