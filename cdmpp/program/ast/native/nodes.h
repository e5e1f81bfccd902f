// Reads TVM's nodes directly from memory. TVM's own reflection tells the kind of an object and the offsets of its fields.
//
// Only headers of tvm_ffi are needed, so compiling takes seconds and one library works with every build of TVM that has these
// nodes. If TVM lacks an expected type or field, this is an error; nothing is guessed.
#pragma once

#include <tvm/ffi/cast.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cdmpp {

namespace ffi = tvm::ffi;
using Object = TVMFFIObject;

/// Thrown for a program that cannot be read; the message says why.
struct ProgramError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum Kind : uint8_t {
  kUnknown,
  // Expressions
  kVar, kTensorLoad, kCall, kIntImm, kFloatImm, kStringImm, kCast, kNot, kBitwiseNot, kSelect, kRamp, kBroadcast,
  kShuffle, kLet,
  // Expressions with operands a and b
  kAdd, kSub, kMul, kDiv, kMod, kFloorDiv, kFloorMod, kMin, kMax, kEQ, kNE, kLT, kLE, kGT, kGE, kAnd, kOr,
  kLShift, kRShift, kBitwiseAnd, kBitwiseOr, kBitwiseXor,
  // Statements
  kFor, kWhile, kBufferStore, kAllocBuffer, kDeclBuffer, kAttrStmt, kSeqStmt, kIfThenElse, kEvaluate, kBind,
  kAssertStmt, kBreak, kContinue, kReturn, kSBlock, kSBlockRealize,
  // Others
  kOp, kIterVar, kRange, kBufferType, kPrimType, kPrimFunc,
  kKinds,
};

/// TVM's type key of each kind.
inline constexpr const char* kTypeKeys[kKinds] = {
    "",
    "ir.Var", "ir.TensorLoad", "ir.Call", "ir.IntImm", "ir.FloatImm", "ir.StringImm", "prim.Cast", "prim.Not",
    "prim.BitwiseNot", "prim.Select", "prim.Ramp", "prim.Broadcast", "prim.Shuffle", "prim.Let",
    "prim.Add", "prim.Sub", "prim.Mul", "prim.Div", "prim.Mod", "prim.FloorDiv", "prim.FloorMod", "prim.Min",
    "prim.Max", "prim.EQ", "prim.NE", "prim.LT", "prim.LE", "prim.GT", "prim.GE", "prim.And", "prim.Or",
    "prim.LShift", "prim.RShift", "prim.BitwiseAnd", "prim.BitwiseOr", "prim.BitwiseXor",
    "tirx.For", "tirx.While", "tirx.BufferStore", "tirx.AllocBuffer", "tirx.DeclBuffer", "tirx.AttrStmt",
    "tirx.SeqStmt", "tirx.IfThenElse", "tirx.Evaluate", "tirx.Bind", "tirx.AssertStmt", "tirx.Break",
    "tirx.Continue", "tirx.Return", "s_tir.SBlock", "s_tir.SBlockRealize",
    "ir.Op", "tirx.IterVar", "ir.Range", "tirx.BufferType", "ir.PrimType", "tirx.PrimFunc",
};

inline bool is_binary(Kind kind) { return kind >= kAdd && kind <= kBitwiseXor; }
inline bool is_compare(Kind kind) { return kind >= kEQ && kind <= kGE; }
inline bool is_division(Kind kind) { return kind >= kDiv && kind <= kFloorMod; }

/// How an object stores a field.
enum Storage : uint8_t { kPointer, kInt32, kDType, kAny };

/// A field of one type; its offset is written to `at`.
struct FieldSpec {
  Kind kind;
  const char* name;
  Storage storage;
  int64_t* at;
};

/// Offsets of fields in bytes. Where several types have a field of the same name, a prefix names the type.
struct Offsets {
  int64_t a, b, expr_ty;
  int64_t var_name, load_source, load_indices, call_op, call_args, int_value, cast_value, not_a, bitwise_not_a,
      select_condition, select_true, select_false, ramp_base, ramp_stride, broadcast_value, shuffle_vectors, let_var,
      let_value, let_body;
  int64_t for_var, for_extent, for_kind, for_body, for_thread, for_annotations, while_body, store_buffer, store_value,
      store_indices, alloc_buffer, attr_key, attr_value, attr_body, seq, if_condition, if_then, if_else,
      evaluate_value, bind_var, bind_value, block_name, block_iter_vars, block_allocated, block_init,
      block_body, realize_values,
      realize_predicate, realize_block;
  int64_t op_name, iter_dom, iter_var, iter_tag, range_extent, buffer_dtype, buffer_scope, buffer_shape, prim_dtype,
      func_body;
};

/// Value of a field that refers to another object; nullptr if it is not set.
inline const Object* pointer(const Object* node, int64_t offset) {
  if (node == nullptr) throw ProgramError("a part of the program is missing");
  return *reinterpret_cast<Object* const*>(reinterpret_cast<const char*>(node) + offset);
}

inline const TVMFFIAny& any(const Object* node, int64_t offset) {
  if (node == nullptr) throw ProgramError("a part of the program is missing");
  return *reinterpret_cast<const TVMFFIAny*>(reinterpret_cast<const char*>(node) + offset);
}

inline std::string_view text(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFISmallStr) return {value.v_bytes, value.small_str_len};
  if (value.type_index != kTVMFFIStr) throw ProgramError("a name in the program is no string");
  const auto* cell = reinterpret_cast<const TVMFFIByteArray*>(value.v_obj + 1);
  return {cell->data, cell->size};
}

inline bool starts_with(std::string_view text, std::string_view head) { return text.substr(0, head.size()) == head; }

[[noreturn]] inline void symbolic(std::string_view what, const TVMFFIAny& name) {
  throw ProgramError(std::string(what) + " " + std::string(text(name)) + " has a symbolic extent: shapes must be fixed");
}

/// The elements of an `ffi.Array` of objects.
class Items {
 public:
  explicit Items(const Object* array) {
    if (array == nullptr || array->type_index != kTVMFFIArray) throw ProgramError("a list in the program is no array");
    const auto* cell = reinterpret_cast<const TVMFFISeqCell*>(array + 1);
    data_ = static_cast<const TVMFFIAny*>(cell->data);
    size_ = static_cast<size_t>(cell->size);
  }
  size_t size() const { return size_; }
  const Object* operator[](size_t i) const {
    if (data_[i].type_index < kTVMFFIStaticObjectBegin) throw ProgramError("a list in the program has items that are no nodes");
    return data_[i].v_obj;
  }

 private:
  const TVMFFIAny* data_;
  size_t size_;
};

/// Size of an element in bytes, and whether it is a floating-point number.
struct Element {
  double bytes;
  bool is_float;
};

/// The types and fields of the TVM that is loaded in this process.
class Nodes {
 public:
  Offsets at{};

  /// Looks up all types and fields in TVM; throws an ffi::Error if one is not as expected.
  Nodes() {
    std::vector<int32_t> index(kKinds, -1);
    for (int kind = kUnknown + 1; kind < kKinds; ++kind) {
      TVMFFIByteArray key{kTypeKeys[kind], std::strlen(kTypeKeys[kind])};
      TVM_FFI_CHECK_SAFE_CALL(TVMFFITypeKeyToIndex(&key, &index[kind]));
      if (index[kind] >= static_cast<int32_t>(kind_of_.size())) kind_of_.resize(index[kind] + 1, kUnknown);
      kind_of_[index[kind]] = static_cast<Kind>(kind);
    }
    for (const FieldSpec& field : fields())
      if (!place(field, index[field.kind]))
        TVM_FFI_THROW(TypeError) << "TVM's " << kTypeKeys[field.kind] << " has no field " << field.name << " as expected";
  }

  Kind kind(const Object* node) const {
    if (node == nullptr) return kUnknown;
    auto index = static_cast<size_t>(node->type_index);
    return index < kind_of_.size() ? kind_of_[index] : kUnknown;
  }

  static std::string type_key(const Object* node) {
    const TVMFFITypeInfo* type = node == nullptr ? nullptr : TVMFFIGetTypeInfo(node->type_index);
    return type == nullptr ? "?" : std::string(type->type_key.data, type->type_key.size);
  }

  const Object* a(const Object* node) const { return pointer(node, at.a); }
  const Object* b(const Object* node) const { return pointer(node, at.b); }

  int64_t int_value(const Object* imm) const {
    const TVMFFIAny& value = any(imm, at.int_value);
    if (value.type_index != kTVMFFIInt && value.type_index != kTVMFFIBool) throw ProgramError("a constant of the program is no integer");
    return value.v_int64;
  }

  /// Value of an extent that must be constant; `what` and `name` say in the error whose extent it is.
  int64_t constant(const Object* extent, std::string_view what, const TVMFFIAny& name) const {
    if (kind(extent) != kIntImm) symbolic(what, name);
    return int_value(extent);
  }

  int32_t for_kind(const Object* loop) const {
    return *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(loop) + at.for_kind);
  }

  Element element(const Object* type) const {
    if (kind(type) != kPrimType) throw ProgramError("a value in the program is no number");
    const auto* dtype = reinterpret_cast<const DLDataType*>(reinterpret_cast<const char*>(type) + at.prim_dtype);
    if (dtype->lanes > 0x7fff) throw ProgramError("the program has vectors of a length that only the device knows");
    bool is_float = dtype->code != kDLInt && dtype->code != kDLUInt && dtype->code != kDLBool;
    return {static_cast<double>(dtype->bits * dtype->lanes) / 8, is_float};
  }

  /// The type of a buffer; throws a ProgramError if it is not a buffer type with a shape.
  const Object* buffer_type(const Object* buffer) const {
    const Object* type = kind(buffer) == kVar ? pointer(buffer, at.expr_ty) : nullptr;
    if (kind(type) != kBufferType) throw ProgramError("the program accesses something that is no buffer with a shape");
    return type;
  }

  bool map_empty(const Object* map) const { return map_size_(reference(map)).cast<int64_t>() == 0; }

  /// The integer under a key of a map; `otherwise` if the key is missing.
  int64_t map_int(const Object* map, const char* key, int64_t otherwise) const {
    if (!map_count_(reference(map), key).cast<int64_t>()) return otherwise;
    ffi::Any value = map_item_(reference(map), key);
    if (auto number = value.try_cast<int64_t>()) return *number;
    auto node = value.try_cast<ffi::ObjectRef>();  // the map keeps the object alive
    auto* object = node ? reinterpret_cast<const Object*>(node->get()) : nullptr;
    if (kind(object) != kIntImm) throw ProgramError(std::string("the annotation ") + key + " is no integer");
    return int_value(object);
  }

 private:
  std::vector<FieldSpec> fields() {
    std::vector<FieldSpec> all = {
        {kVar, "ty", kPointer, &at.expr_ty},
        {kVar, "name", kAny, &at.var_name},
        {kTensorLoad, "source", kPointer, &at.load_source},
        {kTensorLoad, "indices", kPointer, &at.load_indices},
        {kCall, "op", kPointer, &at.call_op},
        {kCall, "args", kPointer, &at.call_args},
        {kIntImm, "value", kAny, &at.int_value},
        {kCast, "value", kPointer, &at.cast_value},
        {kNot, "a", kPointer, &at.not_a},
        {kBitwiseNot, "a", kPointer, &at.bitwise_not_a},
        {kSelect, "condition", kPointer, &at.select_condition},
        {kSelect, "true_value", kPointer, &at.select_true},
        {kSelect, "false_value", kPointer, &at.select_false},
        {kRamp, "base", kPointer, &at.ramp_base},
        {kRamp, "stride", kPointer, &at.ramp_stride},
        {kBroadcast, "value", kPointer, &at.broadcast_value},
        {kShuffle, "vectors", kPointer, &at.shuffle_vectors},
        {kLet, "var", kPointer, &at.let_var},
        {kLet, "value", kPointer, &at.let_value},
        {kLet, "body", kPointer, &at.let_body},
        {kFor, "loop_var", kPointer, &at.for_var},
        {kFor, "extent", kPointer, &at.for_extent},
        {kFor, "kind", kInt32, &at.for_kind},
        {kFor, "body", kPointer, &at.for_body},
        {kFor, "thread_binding", kPointer, &at.for_thread},
        {kFor, "annotations", kPointer, &at.for_annotations},
        {kWhile, "body", kPointer, &at.while_body},
        {kBufferStore, "buffer", kPointer, &at.store_buffer},
        {kBufferStore, "value", kPointer, &at.store_value},
        {kBufferStore, "indices", kPointer, &at.store_indices},
        {kAllocBuffer, "buffer", kPointer, &at.alloc_buffer},
        {kAttrStmt, "attr_key", kAny, &at.attr_key},
        {kAttrStmt, "value", kPointer, &at.attr_value},
        {kAttrStmt, "body", kPointer, &at.attr_body},
        {kSeqStmt, "seq", kPointer, &at.seq},
        {kIfThenElse, "condition", kPointer, &at.if_condition},
        {kIfThenElse, "then_case", kPointer, &at.if_then},
        {kIfThenElse, "else_case", kPointer, &at.if_else},
        {kEvaluate, "value", kPointer, &at.evaluate_value},
        {kBind, "var", kPointer, &at.bind_var},
        {kBind, "value", kPointer, &at.bind_value},
        {kSBlock, "name_hint", kAny, &at.block_name},
        {kSBlock, "iter_vars", kPointer, &at.block_iter_vars},
        {kSBlock, "alloc_buffers", kPointer, &at.block_allocated},
        {kSBlock, "init", kPointer, &at.block_init},
        {kSBlock, "body", kPointer, &at.block_body},
        {kSBlockRealize, "iter_values", kPointer, &at.realize_values},
        {kSBlockRealize, "predicate", kPointer, &at.realize_predicate},
        {kSBlockRealize, "block", kPointer, &at.realize_block},
        {kOp, "name", kAny, &at.op_name},
        {kIterVar, "dom", kPointer, &at.iter_dom},
        {kIterVar, "var", kPointer, &at.iter_var},
        {kIterVar, "thread_tag", kAny, &at.iter_tag},
        {kRange, "extent", kPointer, &at.range_extent},
        {kBufferType, "dtype", kPointer, &at.buffer_dtype},
        {kBufferType, "storage_scope", kAny, &at.buffer_scope},
        {kBufferType, "shape", kPointer, &at.buffer_shape},
        {kPrimType, "dtype", kDType, &at.prim_dtype},
        {kPrimFunc, "body", kPointer, &at.func_body},
    };
    for (int kind = kAdd; kind <= kBitwiseXor; ++kind) {
      all.push_back({static_cast<Kind>(kind), "a", kPointer, &at.a});
      all.push_back({static_cast<Kind>(kind), "b", kPointer, &at.b});
      all.push_back({static_cast<Kind>(kind), "ty", kPointer, &at.expr_ty});
    }
    return all;
  }

  /// Write the offset of a field to `field.at`; false if the type has no such field or stores it in another way.
  static bool place(const FieldSpec& field, int32_t type_index) {
    const TVMFFITypeInfo* own = TVMFFIGetTypeInfo(type_index);
    if (own == nullptr) return false;
    for (int32_t depth = own->type_depth; depth >= 0; --depth) {
      const TVMFFITypeInfo* type = depth == own->type_depth ? own : own->type_ancestors[depth];
      for (int32_t i = 0; i < type->num_fields; ++i) {
        const TVMFFIFieldInfo& found = type->fields[i];
        if (std::string_view(found.name.data, found.name.size) != field.name) continue;
        int32_t held = found.field_static_type_index;
        bool expected = field.storage == kPointer ? found.size == 8 && (held < 0 || held >= kTVMFFIStaticObjectBegin)
                        : field.storage == kInt32 ? found.size == 4 && held == kTVMFFIInt
                        : field.storage == kDType ? found.size == 4 && held == kTVMFFIDataType
                                                  : found.size == sizeof(TVMFFIAny);
        if (!expected || (*field.at != 0 && *field.at != found.offset)) return false;
        *field.at = found.offset;
        return true;
      }
    }
    return false;
  }

  static ffi::ObjectRef reference(const Object* object) {
    return ffi::GetRef<ffi::ObjectRef>(reinterpret_cast<const ffi::Object*>(object));
  }

  std::vector<Kind> kind_of_;
  ffi::Function map_size_ = ffi::Function::GetGlobalRequired("ffi.MapSize");
  ffi::Function map_count_ = ffi::Function::GetGlobalRequired("ffi.MapCount");
  ffi::Function map_item_ = ffi::Function::GetGlobalRequired("ffi.MapGetItem");
};

inline const Nodes& nodes() {
  static const Nodes the_nodes;
  return the_nodes;
}

}  // namespace cdmpp
