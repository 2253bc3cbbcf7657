// Replaces xla_ffi/group_norm/mailbox.cuh for emulate.cc. Prints BAD and aborts if a block sends
// before the mailbox is open, to an address outside of the block's memory, or twice to a slot.
#pragma once
#include "instructions.cuh"
namespace jaxunet::cuda {
struct Barrier;
struct Mailbox {
  Barrier* full;
  float2* slots;

  void open(bool receiver) const {
    if (receiver && threadIdx.x == 0) emu::self->block->open = true;
    cluster_arrive();
  }
  void wait_open() const { cluster_wait(); }
  void send(int rank, int slot, float2 value) const {
    check_smem(full, 16, "mbarrier");
    check_smem(slots + slot, sizeof(float2), "slot");
    emu::Block& to = *emu::self->cluster->blocks[rank];
    const auto place = reinterpret_cast<const char*>(slots + slot) - emu::self->block->smem;
    auto* const there = reinterpret_cast<float2*>(to.smem + place);
    if (!to.open || !std::isnan(there->x)) {
      printf("BAD send: %s\n", to.open ? "twice to a slot" : "mailbox not open");
      abort();
    }
    *there = value;
    to.received += sizeof(float2);
  }
  void wait_full(int bytes) const {
    while (emu::self->block->received < bytes) std::this_thread::yield();
  }
};
}  // namespace jaxunet::cuda
