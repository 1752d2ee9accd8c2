// SPDX-License-Identifier: BSD-3-Clause
// objects.h: compares the addresses of Python objects with those of the last step.
#pragma once

#include <cstddef>
#include <vector>

#include "base/pinned.h"
#include "python/interpreter.h"

namespace optfuse {

// A reference, with the GIL.
class Ref : Pinned {
  public:
    explicit Ref(of_object *object) : held(object) {} // takes it over; or nullptr
    ~Ref() {
        if (held != nullptr)
            of_interpreter.drop(held);
    }
    of_object *get() const { return held; }

  private:
    of_object *const held;
};

// Whether it is of this type, and not of one that inherits from it: that may have other values than
// are in it.
bool is_exactly(of_object *object, of_object *type);

// A dict, or of a class that inherits from it.
bool is_dict(of_object *object);

// The addresses of items of lists and dicts, one after the other; a list of Python's, keep(), keeps
// the items alive as long as addresses are compared.
class Objects {
  public:
    void add(of_object *object) { at.push_back(object); }
    void add_dict(of_object *dict); // its keys and values. What is no dict has none
    void end() { at.push_back(nullptr); }
    Ref keep() const; // a list, with None at the ends; or nullptr after an error of Python's
    const std::vector<of_object *> &all() const { return at; }

  private:
    std::vector<of_object *> at; // nullptr: the end of one
};

// Goes through Objects beside what is there now.
class Comparison {
  public:
    explicit Comparison(const Objects &objects)
        : at(objects.all().data()), last(at + objects.all().size()) {}
    bool next_is(const of_object *object) { return at < last && *at++ == object; }
    bool next_is_list(of_object *list);
    bool next_is_dict(of_object *dict); // in this order
    bool is_over() const { return at == last; }

  private:
    of_object *const *at;
    of_object *const *last;
};

} // namespace optfuse
