// SPDX-License-Identifier: BSD-3-Clause
// numbered.h: the tensors of a tape by numbers, in the order in which lines have them. Two tensors
// over the same elements have one number, such as p and p.data.
#pragma once

#include <cstdint>
#include <vector>

#include "recorded/tape.h"

namespace optfuse::recorded {

struct Entry {
    c10::TensorImpl *impl; // the first that has the number
    c10::StorageImpl *storage;
    int64_t offset, numel;
    at::ScalarType dtype;
    uint32_t storage_number;
    uint32_t next = UINT32_MAX; // on the same storage
    uint32_t seen = 0;          // how many values of the tape refer to impl
    bool is_alone = true;       // on its storage
    bool is_absent;
    bool is_needed = true; // somebody has it, or will, once the lines have run

    void *memory() const {
        return static_cast<char *>(address(storage)) +
               c10::elementSize(dtype) * static_cast<size_t>(offset);
    }
};

// The numbers that storages have, in a table that is empty again at no cost.
class Heads {
  public:
    void clear(size_t most); // so many can come
    // That of the storage; where it has none, it gets this one.
    uint32_t &at(const c10::StorageImpl *storage, uint32_t otherwise) {
        size_t i = reinterpret_cast<uintptr_t>(storage) * 0x9E3779B97F4A7C15ull >> shift;
        while (table[i].round == round && table[i].storage != storage)
            i = (i + 1) & (table.size() - 1);
        if (table[i].round != round)
            table[i] = {storage, round, otherwise};
        return table[i].head;
    }

  private:
    struct Head {
        const c10::StorageImpl *storage;
        uint32_t round, head;
    };
    std::vector<Head> table;
    unsigned shift = 0;
    uint32_t round = 0; // of what counts
};

// The tensors that a schedule needs, and the words that it depends on.
class Numbered {
  public:
    void read(const std::vector<Line> &lines, const std::vector<c10::IValue> &values);
    // The number of a tensor that is on the tape.
    uint32_t of(const at::Tensor &tensor) const;

    std::vector<Entry> entries;
    at::ArrayRef<uint64_t> words() const { return {room.data(), n_words}; } // equal: the same schedule
    uint32_t n_storages = 0;

  private:
    uint32_t find(const c10::TensorImpl *impl, uint32_t first) const;
    void put(const at::Tensor &tensor);
    void put(const c10::IValue &value, bool by_class);
    void put_new(c10::TensorImpl *impl, uint32_t head);
    // There is room for a number and a tensor's form.
    void word(uint64_t x) { room[n_words++] = x; }
    void need(size_t n) {
        if (n_words + n > room.size())
            room.resize(2 * (n_words + n));
    }

    std::vector<uint64_t> room;
    size_t n_words = 0;
    mutable Heads heads;
};

} // namespace optfuse::recorded
