// The functions that cdmpp/program/ast/__init__.py calls.
#include <alloca.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include "table.h"

namespace cdmpp {

/// Names of the operations and of the leaf columns; Python compares them with its own.
ffi::String operations() { return kOperationNames; }
ffi::String leaf_columns() { return kLeafNames; }

/// The columns of the given PrimFuncs, by name. Throws a ValueError if a program cannot be read. Its message numbers the
/// programs from `first`; if `first` is -1, it gives no number.
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

/// Calls a function with the stack `bytes` lower, and returns the number that it returns.
double on_lower_stack(const ffi::Function& run, int64_t bytes) {
  volatile char* room = static_cast<volatile char*>(alloca(bytes));
  room[0] = 0;  // otherwise the compiler would remove the allocation
  return run().cast<double>();
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(on_lower_stack, on_lower_stack)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(operations, operations)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(leaf_columns, leaf_columns)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read, read)

}  // namespace cdmpp
