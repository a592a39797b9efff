//! Columns as integers in the same order, which the kernels of [`weft_roundabout::joins`] compare.

use datafusion::arrow::array::{Array, ArrayData, ArrayRef};
use datafusion::arrow::datatypes::{ArrowNativeType, DataType};
use datafusion::common::utils::normalize_float_zero;
use datafusion::error::{DataFusionError, Result};

/// An integer with the same order as the value that it represents.
pub trait Key: Ord + Copy + Send + Sync + Unpin + 'static {
    /// The least one.
    const MIN: Self;
    /// The greatest one.
    const MAX: Self;
    /// The next value.
    fn next(self) -> Option<Self>;
    /// The previous value.
    fn previous(self) -> Option<Self>;
    /// The keys of a column. The keys of NULL are meaningless.
    fn column(array: &ArrayRef) -> Result<Vec<Self>>;
}

/// The size of the keys of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// `u64`.
    Word,
    /// `u128`.
    Wide,
}

/// The width of a type's keys; `None` for a type that cannot be the key of a band.
pub fn width(data_type: &DataType) -> Option<Width> {
    use DataType::{
        Date32, Date64, Decimal32, Decimal64, Decimal128, Duration, Float32, Float64, Int8, Int16,
        Int32, Int64, Time32, Time64, Timestamp, UInt8, UInt16, UInt32, UInt64,
    };
    match data_type {
        Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | UInt64 | Float32 | Float64
        | Date32 | Date64 | Time32(_) | Time64(_) | Timestamp(..) | Duration(_) | Decimal32(..)
        | Decimal64(..) => Some(Width::Word),
        Decimal128(..) => Some(Width::Wide),
        _ => None,
    }
}

fn unknown(data_type: &DataType) -> DataFusionError {
    DataFusionError::Internal(format!("{data_type} has no keys"))
}

/// The values of an array of a primitive type.
fn values<T: ArrowNativeType>(data: &ArrayData) -> Result<&[T]> {
    let buffer = data
        .buffers()
        .first()
        .ok_or_else(|| unknown(data.data_type()))?;
    Ok(&buffer.typed_data::<T>()[data.offset()..data.offset() + data.len()])
}

/// A signed integer with its sign turned: the order of unsigned ones.
fn signed(value: i64) -> u64 {
    value.cast_unsigned() ^ (1 << 63)
}

impl Key for u64 {
    const MIN: Self = 0;
    const MAX: Self = u64::MAX;

    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }

    fn previous(self) -> Option<Self> {
        self.checked_sub(1)
    }

    fn column(array: &ArrayRef) -> Result<Vec<Self>> {
        use DataType::{
            Date32, Date64, Decimal32, Decimal64, Duration, Float32, Float64, Int8, Int16, Int32,
            Int64, Time32, Time64, Timestamp, UInt8, UInt16, UInt32, UInt64,
        };
        // DataFusion's order: both zeros are equal, and NaN is beyond the infinities (totalOrder of IEEE 754).
        let data = normalize_float_zero(array).to_data();
        macro_rules! keys {
            ($native:ty, $key:expr) => {
                values::<$native>(&data)?.iter().map($key).collect()
            };
        }
        Ok(match data.data_type() {
            Int8 => keys!(i8, |&v| signed(v.into())),
            Int16 => keys!(i16, |&v| signed(v.into())),
            Int32 | Date32 | Time32(_) | Decimal32(..) => keys!(i32, |&v| signed(v.into())),
            Int64 | Date64 | Time64(_) | Timestamp(..) | Duration(_) | Decimal64(..) => {
                keys!(i64, |&v| signed(v))
            }
            UInt8 => keys!(u8, |&v| v.into()),
            UInt16 => keys!(u16, |&v| v.into()),
            UInt32 => keys!(u32, |&v| v.into()),
            UInt64 => keys!(u64, |&v| v),
            Float32 => keys!(f32, |v: &f32| {
                let bits = v.to_bits().cast_signed();
                signed((bits ^ ((bits >> 31).cast_unsigned() >> 1).cast_signed()).into())
            }),
            Float64 => keys!(f64, |v: &f64| {
                let bits = v.to_bits().cast_signed();
                signed(bits ^ ((bits >> 63).cast_unsigned() >> 1).cast_signed())
            }),
            other => return Err(unknown(other)),
        })
    }
}

impl Key for u128 {
    const MIN: Self = 0;
    const MAX: Self = u128::MAX;

    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }

    fn previous(self) -> Option<Self> {
        self.checked_sub(1)
    }

    fn column(array: &ArrayRef) -> Result<Vec<Self>> {
        let data = array.to_data();
        match data.data_type() {
            DataType::Decimal128(..) => Ok(values::<i128>(&data)?
                .iter()
                .map(|&v| v.cast_unsigned() ^ (1 << 127))
                .collect()),
            other => Err(unknown(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datafusion::arrow::array::{
        Date32Array, Decimal128Array, Float32Array, Float64Array, Int8Array, Int64Array,
        TimestampNanosecondArray, UInt64Array,
    };

    use super::*;

    fn ascend<K: Key + std::fmt::Debug>(array: ArrayRef) {
        let keys = K::column(&array).unwrap();
        assert!(keys.is_sorted_by(|a, b| a < b), "{array:?}");
        // A slice has its own keys.
        assert_eq!(K::column(&array.slice(1, 2)).unwrap(), keys[1..3]);
        assert!(width(array.data_type()).is_some());
    }

    #[test]
    fn keys_order_as_the_values_do() {
        ascend::<u64>(Arc::new(Int8Array::from(vec![-128, -1, 0, 1, 127])));
        ascend::<u64>(Arc::new(Int64Array::from(vec![
            i64::MIN,
            -1,
            0,
            1,
            i64::MAX,
        ])));
        ascend::<u64>(Arc::new(UInt64Array::from(vec![0, 1, 1 << 63, u64::MAX])));
        ascend::<u64>(Arc::new(Date32Array::from(vec![-1, 0, 1])));
        ascend::<u64>(Arc::new(TimestampNanosecondArray::from(vec![-5, 0, 7])));
        let floats = [
            f64::NEG_INFINITY,
            -1.5,
            -f64::MIN_POSITIVE,
            0.0,
            1e-300,
            2.5,
            f64::INFINITY,
            f64::NAN,
        ];
        ascend::<u64>(Arc::new(Float64Array::from(floats.to_vec())));
        let floats = [
            f32::NEG_INFINITY,
            -1.5,
            -f32::MIN_POSITIVE,
            0.0,
            1e-30,
            2.5,
            f32::INFINITY,
            f32::NAN,
        ];
        ascend::<u64>(Arc::new(Float32Array::from(floats.to_vec())));
        ascend::<u128>(Arc::new(Decimal128Array::from(vec![
            i128::MIN,
            -1,
            0,
            1,
            i128::MAX,
        ])));
    }

    #[test]
    fn zeros_are_equal() {
        let zeros: ArrayRef = Arc::new(Float64Array::from(vec![0.0, -0.0]));
        let keys = u64::column(&zeros).unwrap();
        assert_eq!(keys[0], keys[1]);
    }

    #[test]
    fn text_is_no_key() {
        assert_eq!(width(&DataType::Utf8), None);
    }
}
