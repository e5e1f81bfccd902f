// What cdmpp/program/ast/__init__.py calls.
#include <alloca.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include "table.h"

namespace cdmpp {

/// Names of operations and of leaf columns, to be compared with those of Python.
ffi::String operations() { return kOperationNames; }
ffi::String leaf_columns() { return kLeafNames; }

/// The columns of PrimFuncs by name. Throws a ValueError for a program that cannot be read; `first` is the number of the
/// first in its message, -1 for none.
ffi::Map<ffi::String, ffi::Tensor> read(const ffi::Array<ffi::ObjectRef>& funcs, int64_t first) {
  Table table;
  for (const ffi::ObjectRef& func : funcs) {
    try {
      table.add(Walk().run(reinterpret_cast<const Object*>(func.get())));
    } catch (const ProgramError& err) {
      TVM_FFI_THROW(ValueError) << (first < 0 ? "" : "program " + std::to_string(first) + ": ") << err.what();
    }
    first += first >= 0;
  }
  return table.columns();
}

/// Calls a function with the stack so many bytes lower, and gives the number that it returns.
double on_lower_stack(const ffi::Function& run, int64_t bytes) {
  volatile char* room = static_cast<volatile char*>(alloca(bytes));
  room[0] = 0;  // or the compiler would do without
  return run().cast<double>();
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(on_lower_stack, on_lower_stack)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(operations, operations)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(leaf_columns, leaf_columns)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read, read)

}  // namespace cdmpp
