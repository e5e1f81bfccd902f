// The C interface that cdmpp/program/native/library.py calls through ctypes.
#include "table.h"

using namespace cdmpp;

namespace {

struct Reader {
  Table table;
};

CallTable& calls() {
  static CallTable the_calls;
  return the_calls;
}

}  // namespace

extern "C" {

/// Names of operations and of leaf columns, to be compared with Python's.
const char* cdmpp_operations() { return kOperationNames; }
const char* cdmpp_leaf_columns() { return kLeafNames; }

/// Ask TVM for its types; to be called once, before readers are made. `names` has `n` names of calls, and `operations`
/// what each counts as. Returns 0, or 1 and a message of at most `size` bytes.
int cdmpp_start(const char** names, const int32_t* operations, int32_t n, char* message, size_t size) {
  for (int32_t i = 0; i < n; ++i) calls()[names[i]] = static_cast<Operation>(operations[i]);
  std::string found;
  if (nodes().find(&found)) return 0;
  size_t length = std::min(found.size(), size - 1);
  std::memcpy(message, found.data(), length);
  message[length] = 0;
  return 1;
}

void* cdmpp_reader_new() { return new (std::nothrow) Reader; }
void cdmpp_reader_free(void* reader) { delete static_cast<Reader*>(reader); }

/// Read `n` PrimFuncs. `nodes_of` gets the nodes of the AST of each, 0 where it is left to Python; `sizes` the number of
/// elements of each array of integers, then of each of reals. Returns 0, or 1 if there is no memory.
int cdmpp_reader_read(void* reader, void** funcs, int64_t n, int64_t* nodes_of, int64_t* sizes) {
  Table& table = static_cast<Reader*>(reader)->table;
  table.clear();
  try {
    for (int64_t i = 0; i < n; ++i) {
      nodes_of[i] = 0;
      if (funcs[i] == nullptr) continue;
      try {
        Program program = Walk(calls()).run(static_cast<const Object*>(funcs[i]));
        table.add(program);
        nodes_of[i] = program.n_nodes;
      } catch (const Unsupported&) {
      }
    }
  } catch (...) {
    table.clear();
    return 1;
  }
  for (const auto& column : table.ints) *sizes++ = static_cast<int64_t>(column.size());
  for (const auto& column : table.reals) *sizes++ = static_cast<int64_t>(column.size());
  return 0;
}

/// Copy what was read: all arrays of integers one after the other, and all of reals.
void cdmpp_reader_copy(void* reader, int64_t* ints, double* reals) {
  const Table& table = static_cast<Reader*>(reader)->table;
  for (const auto& column : table.ints) ints = std::copy(column.begin(), column.end(), ints);
  for (const auto& column : table.reals) reals = std::copy(column.begin(), column.end(), reals);
}

}  // extern "C"
